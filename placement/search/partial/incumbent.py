"""The best plan that a search has found so far."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

import numpy as np

from prefect_rlhf.placement.search.partial.complete import CompletePlan, empty_complete_plan, evaluate, fits
from prefect_rlhf.placement.search.tables.tables import Tables


@dataclass(frozen=True, slots=True)
class Incumbent:
    """Options and meshes by number, in the order of the problem's calls."""

    makespan_us: int
    options: tuple[int, ...]
    meshes: tuple[int, ...]

    @classmethod
    def of(cls, t: Tables, placed: CompletePlan, makespan_us: int) -> Incumbent | None:
        """A copy of `placed`; None when it overflows a device's memory."""
        if not fits(t, placed):
            return None
        return cls(makespan_us, tuple(map(int, placed.option)), tuple(map(int, placed.mesh)))

    def placed(self, t: Tables) -> CompletePlan:
        """As arrays, evaluated."""
        placed = empty_complete_plan(t)
        placed.option[:] = np.array(self.options)
        placed.mesh[:] = np.array(self.meshes)
        evaluate(t, placed)
        return placed


class SearchOutcome(Enum):
    """The value is the sentence for people."""

    OPTIMAL = "proved: no plan of the whole space ends sooner"
    WITHIN_GAP = "stopped: no plan can be better by more than the gap that was asked for"
    OUT_OF_BUDGET = "stopped when the budget was spent"
    INTERRUPTED = "stopped when asked to"
    INFEASIBLE = "proved: no plan fits the devices' memory"
