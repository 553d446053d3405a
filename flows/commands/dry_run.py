"""A dry run from a terminal: all that a run decides before it takes a device, as text, without a Prefect server."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from prefect_rlhf.flows.forms.options import RunOptions
from prefect_rlhf.flows.rlhf_flow import AlgorithmFlow
from prefect_rlhf.flows.training.run import prepare
from prefect_rlhf.placement.lease import Lease
from prefect_rlhf.placement.pictures.text import graph_text, plan_text


def planned_text(flow: AlgorithmFlow, parameters: Mapping[str, Any], lease: Lease) -> str:
    """Return plan and graph of a run of checked `parameters`. Raises InvalidInput or GraphError for what cannot run."""
    options, arguments = RunOptions.split(parameters)
    prepared = prepare(flow.algorithm, arguments, options, lease)
    augmented, prediction = prepared.augmented, prepared.prediction
    lines = [
        f"plan {augmented.plan.name} for {augmented.graph.name}:",
        plan_text(augmented.plan, augmented.graph),
        "graph of one step:",
        graph_text(augmented),
    ]
    if prediction is not None:
        lines.append(f"predicted: {prediction.seconds_per_step:.3g} s a step once it repeats")
    return "\n".join([*lines, f"{prepared.request.options.steps} steps would run, and nothing was started"])
