"""An algorithm: a name and the body that describes one of its iterations."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from prefect_rlhf.placement.graph import DataflowGraph, Dataset
from prefect_rlhf.placement.model import ModelSpec
from prefect_rlhf.tasks.trace import trace_body


@dataclass(frozen=True, slots=True)
class Algorithm:
    """`body` is traced with the run's own arguments, so a setting may change the graph (PPO's old_logprobs)."""

    name: str
    body: Callable[..., None]

    def trace(
        self, arguments: Mapping[str, Any], models: Mapping[str, ModelSpec], datasets: Mapping[str, Dataset]
    ) -> DataflowGraph:
        """The graph of one iteration; `models` and `datasets` say what the parameters of those names are."""
        bound = inspect.signature(self.body).bind(**arguments)
        bound.apply_defaults()
        return trace_body(self.name, self.body, bound.arguments, models, datasets)
