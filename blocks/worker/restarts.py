"""A run's automatic restarts, used and allowed. A label of the flow run stores the count."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import TYPE_CHECKING, Self

if TYPE_CHECKING:
    from prefect.client.schemas.objects import FlowRun

LABEL = "prefect-rlhf.restarts"
ENVIRONMENT_VARIABLE = "RLHF_RESTARTS"


@dataclass(frozen=True, slots=True)
class Restarts:
    """`used` restarts of at most `most`.

    >>> print(Restarts(0, 3).next)
    1 of 3
    >>> Restarts(3, 3).are_left
    False
    """

    used: int = 0
    most: int = 0

    @property
    def are_left(self) -> bool:
        return self.used < self.most

    @property
    def next(self) -> Restarts:
        """The count after another restart."""
        return Restarts(self.used + 1, self.most)

    def __str__(self) -> str:
        return f"{self.used} of {self.most}"

    def to_text(self) -> str:
        """Return the text that the worker passes to a run's processes."""
        return f"{self.used}/{self.most}"

    @classmethod
    def from_environment(cls) -> Self:
        """Read the count that the worker passed to this process; without a worker, no restart is left."""
        used, _, most = os.environ.get(ENVIRONMENT_VARIABLE, "0/0").partition("/")
        return cls(int(used), int(most))


def restarts_of(flow_run: FlowRun) -> int:
    """Return how many restarts the flow run has used."""
    used = flow_run.labels.get(LABEL, 0)
    return used if isinstance(used, int) else 0
