"""What a run works on, as plain values: two runs with equal ones differ only in how and where they run."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import Any

from prefect_rlhf.placement.graph import Call, DataflowGraph


def run_identity(graph: DataflowGraph, seed: int, checkpoint_every: int | None) -> dict[str, Any]:
    """The algorithm with all its settings, the models' shapes and optimizers, the datasets' sizes, and the seed.

    Where models are stored is not part of it, nor is the plan. How often a checkpoint is written is, with staleness:
    a checkpoint then decides which weights are read after it (`Span.drained`).
    """
    models = {model.role: asdict(model) for model in graph.models}
    for model in models.values():
        del model["path"], model["new_head"]  # matter only to where version 0 comes from
    content = {
        "algorithm": graph.name,
        "seed": seed,
        "staleness": graph.staleness,
        "checkpoint_every": checkpoint_every if graph.staleness else None,
        "models": models,
        "datasets": {dataset.name: asdict(dataset) for dataset in graph.datasets},
        "calls": {call.name: _call(call) for call in graph},
    }
    plain: dict[str, Any] = json.loads(json.dumps(content))
    return plain


def first_difference(one: Any, other: Any, path: str = "") -> tuple[str, Any, Any] | None:
    """Where two plain values differ first, and what each has there; None when they are equal.

    >>> first_difference({"lr": 1, "model": {"layers": 2}}, {"lr": 1, "model": {"layers": 3}})
    ('model.layers', 2, 3)
    """
    if isinstance(one, dict) and isinstance(other, dict):
        for key in dict.fromkeys((*one, *other)):
            found = first_difference(one.get(key), other.get(key), f"{path}.{key}" if path else str(key))
            if found is not None:
                return found
        return None
    return None if one == other else (path, one, other)


def _call(call: Call) -> dict[str, Any]:
    content = asdict(call)
    content["operation"]["settings"] = json.loads(call.operation.settings)
    return content
