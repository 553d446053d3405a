"""Gemma 1 and 2, which are planned only."""

from prefect_rlhf.placement.models.families.family import ATTENTION_BIASES, Family
from prefect_rlhf.placement.models.families.layers import FOUR_NORMS, TWO_NORMS

GEMMA = Family(
    "gemma",
    "Gemma",
    TWO_NORMS,
    context=8192,
    head_dim=256,
    kv_heads=16,
    tied=True,
    bias_switches={"attention_bias": ATTENTION_BIASES},
    not_run="GemmaForCausalLM, scaled embeddings and GeLU",
)
GEMMA2 = Family(
    "gemma2",
    "Gemma2",
    FOUR_NORMS,
    context=8192,
    head_dim=256,
    kv_heads=4,
    tied=True,
    bias_switches={"attention_bias": ATTENTION_BIASES},
    not_run="Gemma2ForCausalLM, norms after attention and feed-forward layer, soft caps, sliding windows",
)
