"""Losses and computations as values: a registered name and its settings, so that a graph can be saved and sent.

`@loss` and `@computation` turn a plain function into an Operator, which is registered under the function's name;
calling an Operator with settings binds it.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from typing import Any, Generic, Literal, ParamSpec, TypeVar

from prefect_rlhf.engines.engine import Output
from prefect_rlhf.engines.registry import Registry
from prefect_rlhf.placement.graph import Operation
from prefect_rlhf.tasks.settings import Settings

Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")


@dataclass(frozen=True)
class Operator(Generic[Arguments, Result]):
    """A module-level function that a graph may name.

    `function` is the plain function, for tests and other functions; calling with settings is what a flow body does.
    """

    name: str
    function: Callable[Arguments, Result]
    kind: Literal["loss", "computation"]
    outputs: tuple[str, ...] = ()
    output: Output = "logprobs"
    rows_per_item: int = 1
    stateful: bool = False

    def __call__(self, settings: Settings) -> Bound:
        """Bind settings: what `train_step(loss=...)` takes."""
        return Bound(operation(self.name, settings, self.function.__module__))


OPERATORS: Registry[Operator[..., Any]] = Registry("loss or computation")


def operation(name: str, settings: Settings, module: str = "") -> Operation:
    """Return what a call runs; `module` registers the name, unless that is a word of the engines."""
    kind = type(settings)
    return Operation(name, settings.model_dump_json(), module, f"{kind.__module__}:{kind.__name__}")


@dataclass(frozen=True, slots=True)
class Bound:
    """An Operator with its settings, as strings; resolved where it runs."""

    operation: Operation

    @property
    def operator(self) -> Operator[..., Any]:
        return OPERATORS.find(self.operation.name, self.operation.module)

    @property
    def settings(self) -> Settings:
        module, _, name = self.operation.settings_type.partition(":")
        kind: type[Settings] = getattr(import_module(module), name)
        return kind.model_validate_json(self.operation.settings)

    def __call__(self, *arguments: Any, **offered: Any) -> Any:
        """Run it: on (output, batch) a loss, on one Batch per input a computation.

        Of `offered` (context, state) the function gets what its signature names.
        """
        function = self.operator.function
        parameters = inspect.signature(function).parameters
        accepted = {name: value for name, value in offered.items() if name in parameters}
        return function(*arguments, settings=self.settings, **accepted)


def loss(
    output: Output, *, rows_per_item: int = 1, name: str = ""
) -> Callable[[Callable[Arguments, Result]], Operator[Arguments, Result]]:
    """Mark `f(output, batch, settings) -> LossTerms` as a loss on the model's `output`.

    `rows_per_item` adjacent rows stay in one micro-batch (2 for a chosen and a rejected answer). `name` is what graphs
    and checkpoints know it by; empty: the function's own. Raises GraphError for a name that another definition has.
    """

    def register(function: Callable[Arguments, Result]) -> Operator[Arguments, Result]:
        operator = Operator(name or function.__name__, function, "loss", output=output, rows_per_item=rows_per_item)
        OPERATORS.add(operator.name, function, operator)
        return operator

    return register


def computation(
    *outputs: str, stateful: bool = False, name: str = ""
) -> Callable[[Callable[Arguments, Result]], Operator[Arguments, Result]]:
    """Mark `f(*batches, settings, [context], [state]) -> Computed` as a computation that adds the keys `outputs`.

    It sees all rows of the step at once. With `stateful`, `state` is what it returned a step earlier (None at first).
    `name` is as for a loss.
    """

    def register(function: Callable[Arguments, Result]) -> Operator[Arguments, Result]:
        operator = Operator(name or function.__name__, function, "computation", outputs=outputs, stateful=stateful)
        OPERATORS.add(operator.name, function, operator)
        return operator

    return register
