"""The identity of a run, as plain values: two runs with equal ones differ only in how and where they run."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import Any

from prefect_rlhf.placement.graph import Call, DataflowGraph


def run_identity(graph: DataflowGraph, seed: int, checkpoint_every: int | None) -> dict[str, Any]:
    """Return the algorithm with all its settings, the models' shapes and optimizers, the datasets' sizes, and the seed.

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


def first_difference(left: Any, right: Any, path: str = "") -> tuple[str, Any, Any] | None:
    """Return where two plain values differ first, and what each has there; None when they are equal.

    >>> first_difference({"lr": 1, "model": {"layers": 2}}, {"lr": 1, "model": {"layers": 3}})
    ('model.layers', 2, 3)
    """
    if isinstance(left, dict) and isinstance(right, dict):
        for key in dict.fromkeys((*left, *right)):
            difference = first_difference(left.get(key), right.get(key), f"{path}.{key}" if path else str(key))
            if difference is not None:
                return difference
        return None
    return None if left == right else (path, left, right)


def _call(call: Call) -> dict[str, Any]:
    operation = {"name": call.operation.name, "settings": json.loads(call.operation.settings)}
    return asdict(call) | {"operation": operation}
