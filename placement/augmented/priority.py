"""Priorities between ready nodes; the device locks of a run follow them.

In a step: first the weights that it needs; then evaluation, so that what that needs does not stay on the devices while
training; then calls by how many calls their rows went through; then checkpoints. Before the first call of each such
level come all transfers of rows that the level before made, whichever call they are for: a transfer occupies several
meshes, and behind a long call on one of them it would keep the others from running at the same time.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from prefect_rlhf.placement.augmented.graph_builder import Priority
from prefect_rlhf.placement.graph import Call, DataflowGraph

_WEIGHTS, _EVALUATION, _TRAINING, _CHECKPOINT, _EXPORT = range(5)  # the parts of a step


@dataclass(frozen=True, slots=True)
class CallPriorities:
    """Priorities of the calls of one graph."""

    levels: dict[str, int]
    positions: dict[str, int]

    @classmethod
    def of(cls, graph: DataflowGraph) -> CallPriorities:
        """Give each call a level one above the highest level of the calls whose rows it reads."""
        levels: dict[str, int] = {}
        for call in graph:  # producers come first
            levels[call.name] = 1 + max((levels[name] for name in graph.reads_of(call.name)), default=-1)
        return cls(levels, {call.name: position for position, call in enumerate(graph)})

    def call(self, call: Call, step: int) -> Priority:
        return step, _part(call), self.levels[call.name], self.positions[call.name], 0

    def transfer_to(self, call: Call, step: int, producers: Iterable[str]) -> Priority:
        """Run as soon as the last of its producers has run, though other calls come before the one that it feeds."""
        level = 1 + max(self.levels[name] for name in producers)
        return step, _part(call), level, -1, self.positions[call.name]

    def weights_of(self, call: Call, step: int) -> Priority:
        return step, _WEIGHTS, self.levels[call.name], self.positions[call.name], 0


def just_before(priority: Priority, distance: int = 1) -> Priority:
    """Run before the node of that priority and after what comes before it; further ones first."""
    return *priority[:-1], priority[-1] - distance


def just_after(priority: Priority, distance: int = 1) -> Priority:
    return *priority[:-1], priority[-1] + distance


def checkpoint_of(step: int, position: int) -> Priority:
    """Run after all calls of a step, before the next step's: the next train_step may soon overwrite what was copied."""
    return step, _CHECKPOINT, 0, position, 0


def commit_of(step: int) -> Priority:
    """Run behind the next step, after the copies of all roles."""
    return step, _CHECKPOINT, 1, 0, 0


def export_of(step: int, position: int) -> Priority:
    """Run after all calls of a step."""
    return step, _EXPORT, 0, position, 0


def _part(call: Call) -> int:
    return _TRAINING if call.every is None else _EVALUATION
