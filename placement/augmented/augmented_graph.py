"""The augmented graph: every task run of a training run, with all moves of weights and data as nodes."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from prefect_rlhf.errors.errors import GraphError
from prefect_rlhf.placement.augmented.node import Node
from prefect_rlhf.placement.graph import DataflowGraph
from prefect_rlhf.placement.plan import ExecutionPlan


@dataclass(frozen=True, slots=True)
class AugmentedGraph:
    """All task runs of a training run, or of its first steps, in topological order. It is estimated and drawn.

    `num_steps` is the number of steps of the run, which count from 1. A resumed run continues after `finished` steps:
    trained roles start with weights v`finished`. A run receives its nodes from `StepGroups`, group by group.
    """

    graph: DataflowGraph
    plan: ExecutionPlan
    num_steps: int
    nodes: tuple[Node, ...]
    finished: int = 0
    _by_id: dict[str, Node] = field(init=False, repr=False, compare=False, hash=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "_by_id", {node.id: node for node in self.nodes})
        if len(self._by_id) < len(self.nodes):
            raise GraphError("two nodes of the augmented graph have the same id")
        before: set[str] = set()
        for node in self.nodes:
            for name in node.depends_on:
                if name not in before:
                    raise GraphError(f"{node.id} waits for {name}, which does not come before it")
            before.add(node.id)

    def __iter__(self) -> Iterator[Node]:
        return iter(self.nodes)

    def __len__(self) -> int:
        return len(self.nodes)

    def node(self, id: str) -> Node:
        """The node with this id."""
        return self._by_id[id]

    def of_step(self, step: int) -> tuple[Node, ...]:
        """The nodes of a step, in order."""
        return tuple(node for node in self.nodes if node.step == step)

    @property
    def last_step(self) -> int:
        """The last step that any node belongs to."""
        return max((node.step for node in self.nodes), default=0)
