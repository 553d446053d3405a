"""The dataflow graph of one iteration: model function calls and the data that flows between them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Literal

from prefect_rlhf.placement.errors import GraphError
from prefect_rlhf.placement.model import ModelSpec

CallKind = Literal["generate", "inference", "train_step", "compute"]


@dataclass(frozen=True, slots=True)
class Operation:
    """What a call runs: an importable function and its settings, so that a graph survives JSON.

    `target` is `module:function` (a loss, an advantage estimator) or a plain word an engine knows (`logprobs`,
    `values`, `scores`, `sample`); `settings` is JSON of the class that `settings_type` names in the same way.
    """

    target: str
    settings: str = "{}"
    settings_type: str = ""


@dataclass(frozen=True, slots=True)
class Port:
    """One input of a call: `keys` that call or dataset `source` produced, bound to parameter `argument`."""

    argument: str
    source: str
    keys: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Dataset:
    """A source of items: prompts (a row each) or preference pairs (`rows_per_item` 2). `num_items` is its size."""

    name: str
    keys: tuple[str, ...]
    num_items: int
    rows_per_item: int = 1


@dataclass(frozen=True, slots=True)
class Call:
    """A model function call, or a pure computation on data.

    `role` names the model (None for compute); `outputs` the keys it adds to the rows; `rows_from` the dataset whose
    rows it works on; `every` makes it an evaluation call: it runs at steps 0, every, 2 * every, ... and once after
    the last step. `stateful` computations carry state from step to step.
    `num_rows` rows are worked on in one step (a generate with n samples per prompt: n times its prompts); groups of
    `rows_per_item` adjacent ones (a chosen and a rejected answer) are never split. A train_step takes `epochs` *
    `mini_batches` optimizer steps.
    """

    name: str
    kind: CallKind
    role: str | None
    inputs: tuple[Port, ...]
    outputs: tuple[str, ...]
    operation: Operation
    rows_from: str
    num_rows: int
    every: int | None = None
    stateful: bool = False
    samples_per_prompt: int = 1
    rows_per_item: int = 1
    mini_batches: int = 1
    epochs: int = 1


@dataclass(frozen=True, slots=True)
class DataEdge:
    """`target` reads `keys` that `source` made in the same step."""

    source: str
    target: str
    keys: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class VersionEdge:
    """`target` reads the weights (or state) of `role` that `source` wrote `lag` steps earlier."""

    source: str
    target: str
    role: str
    lag: int


@dataclass(frozen=True, slots=True)
class DataflowGraph:
    """One iteration of an algorithm. Calls are in a topological order of the data edges."""

    name: str
    models: tuple[ModelSpec, ...]
    datasets: tuple[Dataset, ...]
    calls: tuple[Call, ...]
    staleness: int = 0
    _by_name: dict[str, Call] = field(init=False, repr=False, compare=False, hash=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "_by_name", {call.name: call for call in self.calls})
        if len(self._by_name) != len(self.calls):
            names = [call.name for call in self.calls]
            twice = next(name for name in names if names.count(name) > 1)
            raise GraphError(f"flow {self.name}: two calls are named {twice!r}; give one of them name=...")

    def __iter__(self) -> Iterator[Call]:
        return iter(self.calls)

    def call(self, name: str) -> Call:
        return self._by_name[name]

    def model(self, role: str) -> ModelSpec:
        return next(model for model in self.models if model.role == role)

    def trained_by(self, role: str) -> Call | None:
        """The call that writes the weights of `role`, or None when the role is frozen."""
        return next((c for c in self.calls if c.kind == "train_step" and c.role == role), None)

    def data_edges(self) -> tuple[DataEdge, ...]:
        return tuple(
            DataEdge(port.source, call.name, port.keys)
            for call in self.calls
            for port in call.inputs
            if port.source in self._by_name
        )

    def version_edges(self) -> tuple[VersionEdge, ...]:
        """Which train_step each reader of a trained role waits for, and how many steps earlier it ran.

        Every call of a role, its train_step included, that the role's train_step does not precede in the same step
        reads what the train_step of `1 + staleness` steps earlier wrote (the train_step itself: 1 step earlier).
        A stateful computation follows itself in the same way.
        """
        edges = []
        for call in self.calls:
            if call.kind == "compute":
                if call.stateful:
                    edges.append(VersionEdge(call.name, call.name, call.name, 1))
                continue
            assert call.role is not None  # only compute has no role
            trainer = self.trained_by(call.role)
            if trainer is None:
                continue
            after = self.calls.index(call) > self.calls.index(trainer)
            lag = 0 if after else 1 if call == trainer or call.every else 1 + self.staleness
            edges.append(VersionEdge(trainer.name, call.name, call.role, lag))
        return tuple(edges)
