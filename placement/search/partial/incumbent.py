"""A search's outcome, and the best plan found so far."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

import numpy as np

from prefect_rlhf.placement.search.compiled import Ints
from prefect_rlhf.placement.search.partial.complete import INFINITE, CompletePlan, empty_complete_plan, fill_relations
from prefect_rlhf.placement.search.tables.tables import Tables


class SearchOutcome(Enum):
    """Why a search ended; the value is the sentence for people."""

    OPTIMAL = "proved: no plan of the whole space ends sooner"
    WITHIN_GAP = "stopped: no plan can be better by more than the gap that was asked for"
    ENOUGH = "stopped: the bound is as high as was asked for"
    OUT_OF_BUDGET = "stopped when the budget was spent"
    INTERRUPTED = "stopped when asked to"
    INFEASIBLE = "proved: no plan fits the devices' memory"


@dataclass(frozen=True, slots=True)
class Incumbent:
    """Option and mesh numbers, in the order of the problem's calls."""

    makespan_us: int
    options: tuple[int, ...]
    meshes: tuple[int, ...]

    @classmethod
    def from_arrays(cls, makespan_us: int, options: Ints, meshes: Ints) -> Incumbent | None:
        """Copy a plan from arrays; return None if INFINITE marks that no plan exists."""
        if makespan_us == INFINITE:
            return None
        return cls(int(makespan_us), tuple(map(int, options)), tuple(map(int, meshes)))

    def complete_plan(self, t: Tables) -> CompletePlan:
        """Return the plan as arrays, with relations and durations."""
        plan = empty_complete_plan(t)
        plan.option[:] = np.array(self.options)
        plan.mesh[:] = np.array(self.meshes)
        fill_relations(t, plan)
        return plan
