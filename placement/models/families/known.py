"""The known families, by the `model_type` of their config.json."""

from collections.abc import Mapping
from types import MappingProxyType

from prefect_rlhf.placement.models.families.family import Family
from prefect_rlhf.placement.models.families.gemma import GEMMA, GEMMA2
from prefect_rlhf.placement.models.families.gemma3 import GEMMA3
from prefect_rlhf.placement.models.families.llama import LLAMA
from prefect_rlhf.placement.models.families.mistral import MISTRAL
from prefect_rlhf.placement.models.families.mixtral import MIXTRAL
from prefect_rlhf.placement.models.families.qwen2 import QWEN2
from prefect_rlhf.placement.models.families.qwen3 import QWEN3
from prefect_rlhf.placement.models.families.qwen3_moe import QWEN3_MOE

FAMILIES: Mapping[str, Family] = MappingProxyType(
    {family.model_type: family for family in (LLAMA, MISTRAL, QWEN2, QWEN3, GEMMA, GEMMA2, GEMMA3, QWEN3_MOE, MIXTRAL)}
)
RUN = tuple(family for family in FAMILIES.values() if not family.not_run)
"""Families that engines run."""
