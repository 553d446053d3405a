"""Mistral; only models without an active window run (from v0.2 on)."""

from prefect_rlhf.placement.models.families.family import Family, Window
from prefect_rlhf.placement.models.families.layers import TWO_NORMS

MISTRAL = Family(
    "mistral",
    "Mistral",
    TWO_NORMS,
    context=131072,
    kv_heads=8,
    window=Window(default=4096),
    only={"hidden_act": "silu", "attention_dropout": 0.0},
    written={"sliding_window": None},
)
