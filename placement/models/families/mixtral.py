"""Mixtral, which is planned only: Mistral with experts in place of the feed-forward layer."""

from prefect_rlhf.placement.models.families.family import ExpertKeys, Family
from prefect_rlhf.placement.models.families.layers import EXPERTS

MIXTRAL = Family(
    "mixtral",
    "Mixtral",
    EXPERTS,
    context=131072,
    kv_heads=8,
    rope_theta=1e6,
    experts=ExpertKeys(("num_local_experts", "num_experts"), count=8, per_token=2, width_key="intermediate_size"),
    not_run="MixtralForCausalLM, a mixture of experts",
)
