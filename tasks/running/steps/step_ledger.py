"""The ledger of a run's steps: each step's remaining nodes, and the steps that have ended."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable
from dataclasses import dataclass

from prefect_rlhf.placement.augmented.node import BEHIND, Node
from prefect_rlhf.tasks.running.journal import STEPS_KEPT


@dataclass(frozen=True, slots=True)
class EndedSteps:
    """Steps that have ended, in order; `oldest` is the first step that has not ended.

    Steps in `again` had ended before, because a stopping run may write a checkpoint after its last step has ended.
    """

    steps: tuple[int, ...]
    again: frozenset[int]
    oldest: int


class StepLedger:
    """Counts each step's unfinished nodes, except nodes that may run during later steps.

    It is not thread-safe: GraphRunner calls it with its lock held. `last_step` is set by a request to stop.
    """

    def __init__(self) -> None:
        self.last_step: int | None = None
        self._left: Counter[int] = Counter()  # by step in flight
        self._ended: deque[int] = deque(maxlen=STEPS_KEPT)  # the latest

    def hand_out(self, nodes: Iterable[Node]) -> None:
        """Count a group's nodes; nodes after `last_step` are void and do not count."""
        within = (node for node in nodes if self.last_step is None or node.step <= self.last_step)
        self._left.update(node.step for node in within if node.kind not in BEHIND)

    def stop_after(self, step: int) -> None:
        """Make `step` the last step: later nodes that were handed out become void, and no later step ends."""
        self.last_step = step
        for later in [later for later in self._left if later > step]:
            del self._left[later]

    def end(self, node: Node) -> None:
        """Record the end of a node."""
        if node.kind not in BEHIND:
            self._left[node.step] -= 1

    def take_ended(self, first_unfinished: int) -> EndedSteps:
        """Return steps before `first_unfinished` that have no nodes left, each once; all their nodes were handed out.

        A step with nodes still to be handed out has not ended, even if all its nodes so far have.
        """
        steps = tuple(step for step in sorted(self._left) if not self._left[step] and step < first_unfinished)
        again = frozenset(steps).intersection(self._ended)
        for step in steps:
            del self._left[step]
        self._ended.extend(step for step in steps if step not in again)
        return EndedSteps(steps, again, min(self._left, default=first_unfinished))
