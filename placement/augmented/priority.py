"""Priorities between ready nodes; the device locks of a run follow them.

Within a step the order is: the weights that it needs; calls, by level (the number of calls that their rows went
through); checkpoints; evaluation of the trained weights, so that its rows leave the devices before the next step;
exports. All row transfers of a level precede the first call of the next level, whichever call they are for: a transfer
occupies several meshes, so behind a long call on one mesh it would block the others. If the plan sets `rows_first` for
its last producer, a transfer also precedes later calls of the producer's level.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from prefect_rlhf.placement.augmented.graph_builder import Priority
from prefect_rlhf.placement.graph import Call, DataflowGraph
from prefect_rlhf.placement.plan import ExecutionPlan

_WEIGHTS, _TRAINING, _CHECKPOINT, _NEW_WEIGHTS, _EVALUATION, _EXPORT = range(6)  # the parts of a step


@dataclass(frozen=True, slots=True)
class CallPriorities:
    """The priorities of a graph's calls."""

    levels: dict[str, int]
    positions: dict[str, int]

    @classmethod
    def of(cls, graph: DataflowGraph) -> CallPriorities:
        """Give each call the level above the highest level of the calls whose rows it reads."""
        levels: dict[str, int] = {}
        for call in graph:  # producers come first
            levels[call.name] = 1 + max((levels[name] for name in graph.reads_of(call.name)), default=-1)
        return cls(levels, {call.name: position for position, call in enumerate(graph)})

    def call(self, call: Call, step: int) -> Priority:
        return step, _part(call), self.levels[call.name], self.positions[call.name], 0

    def transfer_to(self, call: Call, step: int, producers: Iterable[str], plan: ExecutionPlan) -> Priority:
        """Run after the level of the last producer or, with `rows_first`, directly after that producer."""
        last = max(producers, key=lambda name: (self.levels[name], self.positions[name]))
        if plan[last].rows_first:
            return step, _part(call), self.levels[last], self.positions[last], 1 + self.positions[call.name]
        return step, _part(call), 1 + self.levels[last], -1, self.positions[call.name]

    def weights_of(self, call: Call, step: int) -> Priority:
        return (
            step,
            _WEIGHTS if call.every is None else _NEW_WEIGHTS,
            self.levels[call.name],
            self.positions[call.name],
            0,
        )


def just_before(priority: Priority, distance: int = 1) -> Priority:
    """Run directly before the node with that priority, after all earlier nodes; a larger `distance` means earlier."""
    return *priority[:-1], priority[-1] - distance


def just_after(priority: Priority, distance: int = 1) -> Priority:
    return *priority[:-1], priority[-1] + distance


def checkpoint_of(step: int, position: int) -> Priority:
    """Run after all calls of a step and before the next step's, because its train_step may soon overwrite the copied
    state.
    """
    return step, _CHECKPOINT, 0, position, 0


def commit_of(step: int) -> Priority:
    """Run after the copies of all roles, and after the calls of the next step."""
    return step, _CHECKPOINT, 1, 0, 0


def export_of(step: int, position: int) -> Priority:
    """Run after all calls of a step."""
    return step, _EXPORT, 0, position, 0


def _part(call: Call) -> int:
    return _TRAINING if call.every is None else _EVALUATION
