"""Llama 1 to 3.3, and models with its layers (SmolLM2, R1 distillates of Llama)."""

from prefect_rlhf.placement.models.families.family import ATTENTION_BIASES, MLP_BIASES, Family
from prefect_rlhf.placement.models.families.layers import TWO_NORMS

LLAMA = Family(
    "llama",
    "Llama",
    TWO_NORMS,
    context=2048,
    bias_switches={"attention_bias": ATTENTION_BIASES, "mlp_bias": MLP_BIASES},
    only={"hidden_act": "silu", "attention_dropout": 0.0},
)
