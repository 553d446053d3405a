"""The outcome of a search, and the best plan that it has found so far."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

import numpy as np

from prefect_rlhf.placement.search.compiled import Ints
from prefect_rlhf.placement.search.partial.complete import INFINITE, CompletePlan, empty_complete_plan, fill_relations
from prefect_rlhf.placement.search.tables.tables import Tables


class SearchOutcome(Enum):
    """The value is the sentence for people."""

    OPTIMAL = "proved: no plan of the whole space ends sooner"
    WITHIN_GAP = "stopped: no plan can be better by more than the gap that was asked for"
    ENOUGH = "stopped: the bound is as high as was asked for"
    OUT_OF_BUDGET = "stopped when the budget was spent"
    INTERRUPTED = "stopped when asked to"
    INFEASIBLE = "proved: no plan fits the devices' memory"


@dataclass(frozen=True, slots=True)
class Incumbent:
    """Options and meshes by number, in the order of the problem's calls."""

    makespan_us: int
    options: tuple[int, ...]
    meshes: tuple[int, ...]

    @classmethod
    def from_arrays(cls, makespan_us: int, options: Ints, meshes: Ints) -> Incumbent | None:
        """Copy a plan; None if INFINITE marks that there is no plan."""
        if makespan_us == INFINITE:
            return None
        return cls(int(makespan_us), tuple(map(int, options)), tuple(map(int, meshes)))

    def complete_plan(self, t: Tables) -> CompletePlan:
        """The plan as arrays, with relations and durations."""
        plan = empty_complete_plan(t)
        plan.option[:] = np.array(self.options)
        plan.mesh[:] = np.array(self.meshes)
        fill_relations(t, plan)
        return plan
