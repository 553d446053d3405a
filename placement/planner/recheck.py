"""Price the plan of a run again, after measured steps have corrected the constants, and search for a better plan.

A plan counts as better only if it stays faster under every correction that the measured seconds leave likely.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from prefect_rlhf.placement.plan import ExecutionPlan
from prefect_rlhf.placement.planner.best_plan import plan_graph
from prefect_rlhf.placement.planner.fitted_constants import FittedConstants, Measured, corrected, fit_constants
from prefect_rlhf.placement.planner.question import Question

LEAST_GAIN = 0.1  # of the seconds of a step
LEAST_SURE_GAIN = 0.03  # the same under the least favourable of the likely corrections


@dataclass(frozen=True, slots=True)
class Recheck:
    """The corrected constants, and the seconds of a step that they predict for a run's plan.

    `better` is a plan that is faster by the least gain or more, or None. `best_seconds` are of the best plan found, or
    of the run's plan if no search was made.
    """

    fitted: FittedConstants
    seconds: float
    best_seconds: float
    better: ExecutionPlan | None = None

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
    """Fit the question's constants to nodes measured under `plan`, and search again with a number of evaluations.

    No search follows if the constants do not explain the measured seconds, or if the plan is the answer of a search
    with constants that the measured seconds confirm. Returns None if the seconds of no measured node depend on the
    constants.
    """
    fitted = fit_constants(question, plan, measured)
    if fitted is None:
        return None
    now = question if fitted.confirms else corrected(question, fitted.correction)
    seconds = now.seconds(plan)
    if not fitted.explains or (fitted.confirms and was_searched):
        return Recheck(fitted, seconds, seconds)
    best = plan_graph(now, evaluations=evaluations).plan
    gains = [1 - each.seconds(best) / each.seconds(plan) for each in (corrected(question, c) for c in fitted.likely)]
    found = Recheck(fitted, seconds, now.seconds(best), best)
    is_better = found.gain >= least_gain and min(gains, default=found.gain) >= LEAST_SURE_GAIN
    return found if is_better else Recheck(fitted, seconds, found.best_seconds)


def pays(found: Recheck, steps_left: int, move_seconds: float) -> bool:
    """Return whether the better plan saves at least twice the seconds of the move to it, in the steps that are left."""
    return (found.seconds - found.best_seconds) * steps_left > 2 * move_seconds
