"""Qwen 3, dense: Llama with norms of queries and keys."""

from prefect_rlhf.placement.models.families.family import ATTENTION_BIASES, Family, Window
from prefect_rlhf.placement.models.families.layers import TWO_NORMS_AND_QK

QWEN3 = Family(
    "qwen3",
    "Qwen3",
    TWO_NORMS_AND_QK,
    context=32768,
    head_dim=128,
    kv_heads=32,
    bias_switches={"attention_bias": ATTENTION_BIASES},
    window=Window(default=4096, switch="use_sliding_window", others=("max_window_layers", "layer_types")),
    only={"hidden_act": "silu", "attention_dropout": 0.0},
    written={"use_sliding_window": False},
)
