"""Losses and computations as values: an importable name and its settings, so that a graph can be saved and sent.

`@loss` and `@computation` turn a plain function into an Operator; calling an Operator with settings binds it.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Generic, Literal, ParamSpec, TypeVar

from prefect_rlhf.placement.graph import Operation
from prefect_rlhf.tasks.settings import Settings

P = ParamSpec("P")
R = TypeVar("R")
OutputName = Literal["logprobs", "values", "scores"]


@dataclass(frozen=True)
class Operator(Generic[P, R]):
    """A module-level function that a graph may name.

    `function` is the plain function, for tests and other functions; `bind(settings)` is what a flow body uses.
    """

    function: Callable[P, R]
    kind: Literal["loss", "computation"]
    outputs: tuple[str, ...] = ()
    output: OutputName = "logprobs"
    rows_per_item: int = 1
    stateful: bool = False

    @property
    def target(self) -> str:
        return f"{self.function.__module__}:{self.function.__name__}"

    @property
    def name(self) -> str:
        return self.function.__name__

    def __call__(self, settings: Settings) -> Bound:
        """Bind settings: what `train_step(loss=...)` takes."""
        return Bound(self.target, type(settings).__module__ + ":" + type(settings).__name__, settings.model_dump_json())


@dataclass(frozen=True, slots=True)
class Bound:
    """An Operator with its settings, as three strings; resolved where it runs."""

    target: str
    settings_type: str
    settings_json: str

    @property
    def operator(self) -> Operator[..., Any]:
        found = _resolve(self.target)
        if not isinstance(found, Operator):
            raise TypeError(f"{self.target} is not decorated with @loss or @computation")
        return found

    @property
    def settings(self) -> Settings:
        kind: type[Settings] = _resolve(self.settings_type)
        return kind.model_validate_json(self.settings_json)

    def __call__(self, *arguments: Any, **offered: Any) -> Any:
        """Run it: on (output, batch) a loss, on one Batch per input a computation.

        Of `offered` (context, state) the function gets what its signature names.
        """
        function = self.operator.function
        named = inspect.signature(function).parameters
        wanted = {name: value for name, value in offered.items() if name in named}
        return function(*arguments, settings=self.settings, **wanted)

    @property
    def operation(self) -> Operation:
        return Operation(self.target, self.settings_json, self.settings_type)

    @classmethod
    def of(cls, operation: Operation) -> Bound:
        return cls(operation.target, operation.settings_type, operation.settings)


def loss(output: OutputName, *, rows_per_item: int = 1) -> Callable[[Callable[P, R]], Operator[P, R]]:
    """Mark `f(output, batch, settings) -> LossTerms` as a loss on the model's `output`.

    `rows_per_item` adjacent rows stay in one micro-batch (2 for a chosen and a rejected answer).
    """
    return lambda function: Operator(function, "loss", output=output, rows_per_item=rows_per_item)


def computation(*outputs: str, stateful: bool = False) -> Callable[[Callable[P, R]], Operator[P, R]]:
    """Mark `f(*batches, settings, [context], [state]) -> Computed` as a computation that adds the keys `outputs`.

    It sees all rows of the step at once. With `stateful`, `state` is what it returned a step earlier (None at first).
    """
    return lambda function: Operator(function, "computation", outputs=outputs, stateful=stateful)


def _resolve(target: str) -> Any:
    module, _, name = target.partition(":")
    return getattr(importlib.import_module(module), name)
