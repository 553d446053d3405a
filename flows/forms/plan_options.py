"""The options of a plan that is only asked about: the form of `rlhf/plan`, and the flags of the command."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

from pydantic import Field

from prefect_rlhf.flows.forms.check import checked_parameters
from prefect_rlhf.flows.forms.options import Form
from prefect_rlhf.placement.search.driver import Method


class PlanOptions(Form):
    """One question: which plan, for this algorithm with these models on that cluster?"""

    algorithm: str = Field("ppo", description="ppo, dpo, grpo, remax, reward, or module:function of your own.")
    models: dict[str, str] = Field(
        {}, description="Of each role: a known shape such as llama-70b, or a Hugging Face folder."
    )
    parameters: dict[str, Any] = Field({}, description="The algorithm's own parameters, as its deployment takes them.")
    cluster: str = Field("", description="Such as 16x8:h100; empty is the mesh that the work pool would lease.")
    network: str = Field("", description="Between nodes: Gbit/s of a node, or a name such as roce-3200.")
    device_memory_gib: float | None = Field(None, gt=0, description="Of one device; empty takes its datasheet's.")
    profiles: list[str] = Field([], description="Files of measured times, in place of datasheets.")
    prompt_length: str = Field(
        "",
        description="Tokens: 1024, or 512:3,1024:1 (three of one to one of the other), or a run's rollouts (Parquet).",
    )
    response_length: str = Field("", description="Tokens of a response, said in the same ways.")
    batch_size: int | None = Field(None, ge=1, description="The algorithm's own batch_size, for short.")
    method: Method = Field("exact", description="How plans are searched.")
    budget_seconds: float = Field(2.0, description="Processor time of the search.")
    explain: bool = Field(False, description="Say of each call why it is placed so, and what the runner-up costs.")
    sweep: list[int] = Field([], description="Numbers of nodes to plan for besides, to compare.")
    output_dir: str = Field("plans", description="Folder for plan file, report, certificate and pictures.")


def plan_options(values: Mapping[str, Any]) -> PlanOptions:
    """Return the options that `values` are. Raises InvalidInput for the first that is wrong."""
    return PlanOptions(**checked_parameters(inspect.Signature(PlanOptions.signature()), values))
