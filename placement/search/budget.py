"""Budgets: how long a search may last, in evaluations or in processor time.

Evaluations are bounds and schedules of plans. They are the default, because the same question then has the same answer
on any machine and at any load. Seconds end a search on time, but how far it gets depends on the machine.
"""

from __future__ import annotations

import math
import time
from dataclasses import dataclass

from prefect_rlhf.errors.errors import InvalidInput

EVALUATIONS = 400_000  # by default, for a question
ESTIMATE = 4_000  # evaluations that take about as long as an estimate of a plan on its augmented graph


@dataclass(frozen=True, slots=True)
class Budget:
    """About `evaluations`, or `seconds` of processor time; whichever limit is reached first."""

    evaluations: float = math.inf
    seconds: float = math.inf

    @classmethod
    def of(cls, evaluations: float | None = None, seconds: float | None = None) -> Budget:
        """Return the requested budget, by default `EVALUATIONS`. Raises InvalidInput for a limit that is not positive.

        >>> Budget.of()
        Budget(evaluations=400000, seconds=inf)
        """
        for field, limit in (("evaluations", evaluations), ("budget_seconds", seconds)):
            if limit is not None and not limit > 0:
                raise InvalidInput(field, limit, f"more than 0 {field.removeprefix('budget_')}")
        if evaluations is None:
            evaluations = EVALUATIONS if seconds is None else math.inf
        return cls(evaluations, math.inf if seconds is None else seconds)

    def times(self, share: float) -> Budget:
        """Return a share of the budget."""
        return Budget(self.evaluations * share, self.seconds * share)

    def at_least(self, other: Budget) -> Budget:
        """Return the larger of both budgets, limit by limit."""
        return Budget(max(self.evaluations, other.evaluations), max(self.seconds, other.seconds))

    def at_most(self, other: Budget) -> Budget:
        """Return the budget with its finite limits lowered to the other's."""
        evaluations = min(self.evaluations, other.evaluations) if self.evaluations < math.inf else math.inf
        return Budget(evaluations, min(self.seconds, other.seconds) if self.seconds < math.inf else math.inf)

    @property
    def is_spent(self) -> bool:
        """Whether the budget is used up."""
        return self.evaluations <= 0 or self.seconds <= 0


class Meter:
    """What is left of a budget: seconds pass on their own, evaluations count when they are reported."""

    def __init__(self, budget: Budget) -> None:
        self._budget, self._evaluations, self._began = budget, 0.0, time.process_time()

    def spend(self, evaluations: float) -> None:
        """Report evaluations."""
        self._evaluations += evaluations

    @property
    def spent(self) -> float:
        """The reported evaluations."""
        return self._evaluations

    @property
    def left(self) -> Budget:
        """Return the rest of the budget; limits may be below 0."""
        elapsed = time.process_time() - self._began
        return Budget(self._budget.evaluations - self._evaluations, self._budget.seconds - elapsed)
