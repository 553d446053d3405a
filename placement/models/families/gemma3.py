"""Gemma 3's language models: four norms a layer, windows in five layers of six, two rotary bases."""

from prefect_rlhf.placement.models.families.family import ATTENTION_BIASES, Family, LocalLayers
from prefect_rlhf.placement.models.families.layers import FOUR_NORMS_AND_QK

GEMMA3 = Family(
    "gemma3_text",
    "Gemma3",
    FOUR_NORMS_AND_QK,
    classifier="Gemma3Text",
    context=131072,
    head_dim=256,
    heads=8,
    kv_heads=4,
    vocabulary=262208,
    tied=True,
    rope_theta=1e6,
    activation="gelu_tanh",
    scaled_embedding=True,
    zero_centered_norms=True,
    local_layers=LocalLayers(tokens=4096, every=6, rope_theta=1e4),
    bias_switches={"attention_bias": ATTENTION_BIASES},
    reads=("query_pre_attn_scalar",),
    only={
        "hidden_activation": "gelu_pytorch_tanh",
        "attention_dropout": 0.0,
        "attn_logit_softcapping": None,
        "final_logit_softcapping": None,
        "use_bidirectional_attention": False,
    },
)
