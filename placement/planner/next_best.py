"""The best plans of a question, the fastest by the estimate first: the searched plan, presets, and runners-up.

Presets precede runners-up: they differ in several calls, so a measurement of them reveals more.
"""

from collections.abc import Iterator

from prefect_rlhf.placement.plan import ExecutionPlan
from prefect_rlhf.placement.planner.explain import explain
from prefect_rlhf.placement.planner.neighbours import changed_plan
from prefect_rlhf.placement.planner.planned import Planned, differently_placed
from prefect_rlhf.placement.planner.question import Question


def next_best(question: Question, planned: Planned, count: int) -> list[ExecutionPlan]:
    """Return up to `count` different plans that fit; fewer if the space holds no more plans of interest."""
    presets = [(result.plan, result.estimate.seconds) for result in planned.presets if result.plan and result.estimate]
    best = differently_placed([(planned.plan, planned.seconds), *presets])
    if len(best) < count:
        others = differently_placed([(plan, question.seconds(plan)) for plan in _runners_up(question, planned)])
        placements = {plan.placements for plan in best}
        best += [plan for plan in others if plan.placements not in placements]
    return best[:count]


def _runners_up(question: Question, planned: Planned) -> Iterator[ExecutionPlan]:
    """Plans in which a single call has its second-best placement."""
    for explanation in explain(question, planned):
        if explanation.runner_up is not None:
            plan = changed_plan(question, planned.plan, explanation.call, explanation.runner_up.placement)
            assert plan is not None  # it was estimated
            yield ExecutionPlan(f"other {explanation.call}", plan.cluster, plan.placements)
