"""Searches plans that stay fast if a constant is wrong, and chooses the simplest."""

from collections.abc import Callable, Sequence
from dataclasses import replace

from prefect_rlhf.placement.cost.datasheets.correction import Correction
from prefect_rlhf.placement.plan import ExecutionPlan
from prefect_rlhf.placement.planner.attempts import search_whole_space
from prefect_rlhf.placement.planner.fitted_constants import corrected
from prefect_rlhf.placement.planner.neighbours import MOST_DEVICES
from prefect_rlhf.placement.planner.passes.local_search import STARTS, improved
from prefect_rlhf.placement.planner.passes.pool import Pool
from prefect_rlhf.placement.planner.passes.simplicity import STEADY, simplest
from prefect_rlhf.placement.planner.planned import differently_placed
from prefect_rlhf.placement.planner.question import Question
from prefect_rlhf.placement.schedule.changed_constants import TWICE, changed_seconds
from prefect_rlhf.placement.search.budget import Budget

UNDER = Correction(compute=0.85, eager_launch=1.4)
"""The change of constants under which further plans are searched. The plans of other searches lose most by slower
launches and by faster compute (ADR 22)."""
STEADY_SHARE = 0.05  # of the budget, for the search under the change
"""The local searches after it have this share of the seconds together; each may use all evaluations."""
RIVALS = 8  # plans, the fastest, that a plan is compared with under each change


def may_be_unsteady(pool: Pool) -> bool:
    """Whether to search plans under the change `UNDER`.

    Not if the fastest plan does not depend on it, nor on many devices, which takes long; nor with staleness, because no
    plan found that way is steadier and nearly as fast; nor on hosts, because their constants are measured.
    """
    question = pool.question
    devices = [node.device for node in question.site.sources.nodes]
    is_measured = any(device.measured or device.is_host for device in devices)
    if is_measured or question.graph.staleness > 0 or question.site.mesh.num_devices > MOST_DEVICES:
        return False
    return corrected(question, UNDER).seconds(pool.fastest) != question.seconds(pool.fastest)


def search_steady(pool: Pool) -> Pool:
    """Add plans that are fast under the change.

    These are the fastest few of the pool and of a short search that knows the change, improved under the change.
    """
    changed, budget = corrected(pool.question, UNDER), pool.request.budget.times(STEADY_SHARE)
    space = pool.request.space_of(changed)
    under = replace(pool.request, question=changed, space=space, budget=budget, progress=None)
    found = search_whole_space(under).plans
    known = [*(plan for plan, _ in pool.timed), pool.fastest, *found]
    starts = differently_placed((plan, changed.seconds(plan)) for plan in known)[:STARTS]
    share = Budget(pool.request.budget.evaluations, budget.seconds / STARTS)
    of_changed = replace(pool, request=under)
    steady = [of_changed.refined(improved(changed, space, [start], share)) for start in starts]
    pool = pool.with_fastest(steady)
    timed = (*pool.timed, *((plan, pool.question.seconds(plan)) for plan in steady))
    return replace(pool, timed=timed, rivals=(pool.fastest, *steady, *differently_placed(timed)[:RIVALS]))


def choose_simplest(pool: Pool) -> Pool:
    """Choose the simplest of the nearly fastest plans; refine it if it stays steady."""
    question, space, fastest = pool.question, pool.request.space, pool.fastest
    regret = _regret(question, pool.rivals)
    simple = simplest(question, space, fastest, pool.timed, pool.at_most, regret, pool.rivals, pool.request.simplicity)
    plan = fastest if simple is fastest else pool.refined(replace(simple, name="auto"))
    if regret(plan) > max(STEADY, regret(simple)):
        plan = replace(simple, name="auto")
    return replace(pool, chosen=plan)


def _regret(question: Question, rivals: Sequence[ExecutionPlan]) -> Callable[[ExecutionPlan], float]:
    """By how much a plan is at worst slower than the fastest rival if a constant takes twice as long, as a share."""
    known: dict[object, tuple[float, ...]] = {}

    def seconds(plan: ExecutionPlan) -> tuple[float, ...]:
        if plan.placements not in known:
            sources = question.site.sources
            known[plan.placements] = changed_seconds(question.graph, plan, question.workload, sources, TWICE.values())
        return known[plan.placements]

    least = [min(each) for each in zip(*map(seconds, rivals), strict=True)]

    def regret(plan: ExecutionPlan) -> float:
        return max(mine / best for mine, best in zip(seconds(plan), least, strict=True)) - 1 if least else 0.0

    return regret
