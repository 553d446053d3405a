"""Prices a run's plan again, after measured steps have corrected the constants, and searches for a better plan.

A plan counts as better only if it stays faster under every correction that the measured seconds leave likely. It gets
the largest caches that fit, since responses may grow after these steps.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from prefect_rlhf.placement.cost.datasheets.hardware import GIB
from prefect_rlhf.placement.cost.paged_cache import gib_above
from prefect_rlhf.placement.memory.savings import with_changes
from prefect_rlhf.placement.plan import ExecutionPlan, instances
from prefect_rlhf.placement.planner.best_plan import plan_graph
from prefect_rlhf.placement.planner.fitted_constants import FittedConstants, Measured, corrected, fit_constants
from prefect_rlhf.placement.planner.question import Question
from prefect_rlhf.placement.planner.space.candidates import CACHE_STEP

LEAST_GAIN = 0.1  # of the seconds of a step
LEAST_SURE_GAIN = 0.03  # the same under the least favourable of the likely corrections
LARGER_CACHES = (CACHE_STEP**4, CACHE_STEP**3, CACHE_STEP**2, CACHE_STEP)  # tried if a cache for all rows does not fit


@dataclass(frozen=True, slots=True)
class Recheck:
    """The corrected constants, and the step time that they predict for a run's plan."""

    fitted: FittedConstants
    seconds: float
    best_seconds: float
    """The time of the best plan found, or of the run's plan if no search was made."""
    better: ExecutionPlan | None = None
    """A plan that is faster by at least the least gain, or None."""

    @property
    def gain(self) -> float:
        """The share of a step that the best plan saves."""
        return 1 - self.best_seconds / self.seconds


def recheck(
    question: Question,
    plan: ExecutionPlan,
    measured: Mapping[str, Measured],
    evaluations: int,
    *,
    was_searched: bool,
    least_gain: float = LEAST_GAIN,
) -> Recheck | None:
    """Fit the question's constants to nodes measured under `plan`, and search again with this many evaluations.

    No search follows if the constants do not explain the measured seconds, or if the plan came from a search with
    constants that the measured seconds confirm. Returns None if no measured node's seconds depend on the constants.
    """
    fitted = fit_constants(question, plan, measured)
    if fitted is None:
        return None
    now = question if fitted.confirms else corrected(question, fitted.correction)
    seconds = now.seconds(plan)
    if not fitted.explains or (fitted.confirms and was_searched):
        return Recheck(fitted, seconds, seconds)
    best = with_largest_caches(now, plan_graph(now, evaluations=evaluations, proves=False).plan)
    gains = [1 - each.seconds(best) / each.seconds(plan) for each in (corrected(question, c) for c in fitted.likely)]
    found = Recheck(fitted, seconds, now.seconds(best), best)
    is_better = found.gain >= least_gain and min(gains, default=found.gain) >= LEAST_SURE_GAIN
    return found if is_better else Recheck(fitted, seconds, found.best_seconds)


def with_largest_caches(question: Question, plan: ExecutionPlan) -> ExecutionPlan:
    """Return the plan with room in each key-value cache for all rows at maximum length, or else up to four times its
    size.

    A search sizes a cache for the expected row lengths. A larger cache that fits costs no time.
    """
    for calls in instances(question.graph, plan).values():
        size = plan[calls[0].name].cache_gib
        if size is not None:
            sizes = (None, *(gib_above(size * GIB * by) for by in LARGER_CACHES))
            plan = next(filter(question.fits, [with_changes(plan, calls, cache_gib=each) for each in sizes]), plan)
    return plan


def pays(found: Recheck, steps_left: int, switch_seconds: float) -> bool:
    """Whether the better plan saves at least twice the switch's seconds in the remaining steps."""
    return (found.seconds - found.best_seconds) * steps_left > 2 * switch_seconds
