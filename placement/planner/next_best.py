"""The best plans of a question, the fastest by the estimate first: the searched one, presets, and runners-up of a call.

Presets come before runners-up: they differ in more than one call, and so tell more when they are measured.
"""

from __future__ import annotations

from collections.abc import Iterator

from prefect_rlhf.placement.plan import ExecutionPlan
from prefect_rlhf.placement.planner.explain import explain
from prefect_rlhf.placement.planner.neighbours import changed_plan
from prefect_rlhf.placement.planner.planned import Planned
from prefect_rlhf.placement.planner.question import Planner


def next_best(planner: Planner, found: Planned, count: int) -> list[ExecutionPlan]:
    """Up to `count` different plans that fit; fewer where the space holds no more that anybody would ask for."""
    presets = [(one.plan, one.estimate.seconds) for one in found.presets if one.plan and one.estimate]
    known = _different([(found.plan, found.seconds), *presets])
    if len(known) < count:
        others = [(plan, planner.seconds(plan)) for plan in _runners_up(planner, found)]
        known += [plan for plan in _different(others) if plan.placements not in {one.placements for one in known}]
    return known[:count]


def _different(timed: list[tuple[ExecutionPlan, float]]) -> list[ExecutionPlan]:
    """One plan of each that place every call alike, the fastest first; of equal ones the first."""
    kept: dict[object, ExecutionPlan] = {}
    for plan, _ in sorted(timed, key=lambda pair: pair[1]):
        kept.setdefault(plan.placements, plan)
    return list(kept.values())


def _runners_up(planner: Planner, found: Planned) -> Iterator[ExecutionPlan]:
    """The plan with one call where it would be second best."""
    for one in explain(planner, found.plan, found.estimate, found.candidates):
        if one.runner_up is not None:
            plan = changed_plan(planner, found.plan, one.call, one.runner_up.placement)
            assert plan is not None  # it was estimated
            yield ExecutionPlan(f"other {one.call}", plan.cluster, plan.placements)
