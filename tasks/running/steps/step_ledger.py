"""The ledger of a run's steps: the nodes that each step in flight has left, and the steps that have ended."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable
from dataclasses import dataclass

from prefect_rlhf.placement.augmented.node import BEHIND, Node
from prefect_rlhf.tasks.running.journal import STEPS_KEPT


@dataclass(frozen=True, slots=True)
class EndedSteps:
    """Steps that have ended, in order; `oldest` is the first step that has not.

    Steps in `again` had ended before: the checkpoint of a stopping run may follow the end of its step.
    """

    steps: tuple[int, ...]
    again: frozenset[int]
    oldest: int


class StepLedger:
    """Counts the nodes of the steps in flight that have not ended, except nodes that run behind their step.

    It is not thread-safe: GraphRunner calls it with its lock held. `last_step` is set by a request to stop.
    """

    def __init__(self) -> None:
        self.last_step: int | None = None
        self._left: Counter[int] = Counter()  # by step in flight
        self._ended: deque[int] = deque(maxlen=STEPS_KEPT)  # the latest

    def hand_out(self, nodes: Iterable[Node]) -> None:
        """Count the nodes of a group; nodes after `last_step` are void and do not count."""
        within = (node for node in nodes if self.last_step is None or node.step <= self.last_step)
        self._left.update(node.step for node in within if node.kind not in BEHIND)

    def stop_after(self, step: int) -> None:
        """Make `step` the last step: nodes of later steps that were handed out are void, and no later step ends."""
        self.last_step = step
        for later in [later for later in self._left if later > step]:
            del self._left[later]

    def end(self, node: Node) -> None:
        """Record the end of a node."""
        if node.kind not in BEHIND:
            self._left[node.step] -= 1

    def take_ended(self, first_unfinished: int) -> EndedSteps:
        """Return the steps before `first_unfinished` without a node left, each once; they were handed out whole.

        A step with later nodes to hand out has not ended, even if its nodes so far have.
        """
        steps = tuple(step for step in sorted(self._left) if not self._left[step] and step < first_unfinished)
        again = frozenset(steps).intersection(self._ended)
        for step in steps:
            del self._left[step]
        self._ended.extend(step for step in steps if step not in again)
        return EndedSteps(steps, again, min(self._left, default=first_unfinished))
