"""Qwen 2 and 2.5, and R1 distillates of them: Llama with biases of queries, keys and values."""

from prefect_rlhf.placement.models.families.family import Family, Window
from prefect_rlhf.placement.models.families.layers import TWO_NORMS
from prefect_rlhf.placement.models.model import QUERY_BIASES

QWEN2 = Family(
    "qwen2",
    "Qwen2",
    TWO_NORMS,
    context=32768,
    kv_heads=32,
    head_dim_is_free=False,
    always_biases=QUERY_BIASES,
    window=Window(default=4096, switch="use_sliding_window", others=("max_window_layers", "layer_types")),
    only={"hidden_act": "silu", "attention_dropout": 0.0},
    written={"use_sliding_window": False},
)
