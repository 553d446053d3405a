"""Qwen 3, mixtures of experts, which are planned only: every layer has experts, without shared experts."""

from prefect_rlhf.placement.models.families.family import ATTENTION_BIASES, ExpertKeys, Family
from prefect_rlhf.placement.models.families.layers import EXPERTS_AND_QK

QWEN3_MOE = Family(
    "qwen3_moe",
    "Qwen3Moe",
    EXPERTS_AND_QK,
    context=32768,
    kv_heads=4,
    bias_switches={"attention_bias": ATTENTION_BIASES},
    experts=ExpertKeys(
        ("num_experts", "num_local_experts"),
        count=128,
        per_token=8,
        width_key="moe_intermediate_size",
        uniform={"decoder_sparse_step": 1, "mlp_only_layers": []},
    ),
    not_run="Qwen3MoeForCausalLM, a mixture of experts",
)
