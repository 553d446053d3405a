"""Local search from the fastest plans of a pool, on the augmented graph."""

from collections.abc import Iterable, Sequence
from dataclasses import replace

from prefect_rlhf.placement.plan import ExecutionPlan
from prefect_rlhf.placement.planner.attempts import is_close
from prefect_rlhf.placement.planner.neighbours import MOST_DEVICES, improve_locally, rows_first
from prefect_rlhf.placement.planner.passes.pool import Pool, Timed
from prefect_rlhf.placement.planner.planned import differently_placed
from prefect_rlhf.placement.planner.question import Question
from prefect_rlhf.placement.planner.space.plan_problem import PlanSpace
from prefect_rlhf.placement.planner.time_sharing import keep_resident_where_free
from prefect_rlhf.placement.search.budget import Budget, Meter

STARTS = 3  # plans that are improved if no plan is close to the bound
MOST_DEVICES_AHEAD = 256  # with more, the local search does not begin again with rows that move first


def improve_fastest(pool: Pool) -> Pool:
    """Improve the fastest plan if it is close to the bound, else the fastest few."""
    if is_close(pool.request, pool.findings):
        starts = _starts(pool.question, pool.timed, 1)
    else:
        turns = [plan for finding in pool.findings if finding.take_turns for plan in finding.plans]
        starts = _starts(pool.question, pool.timed, STARTS, turns)
    best = improved(pool.question, pool.request.space, starts, pool.budget)
    return replace(pool, fastest=best, improved=tuple(starts))


def is_small_enough_to_begin_again(pool: Pool) -> bool:
    """Whether the local search starts again from plans with `rows_first`."""
    return pool.question.site.mesh.num_devices <= MOST_DEVICES_AHEAD


def improve_with_rows_first(pool: Pool) -> Pool:
    """Improve several starts with `rows_first` for all calls; on many devices a single start."""
    question = pool.question
    first = [rows_first(question, plan) for plan, _ in pool.timed]
    most = len(pool.improved) if question.site.mesh.num_devices <= MOST_DEVICES else 1
    starts = _starts(question, [(plan, question.seconds(plan)) for plan in first], most)
    fitting = [start for start in starts if question.fits(start)]
    return pool.with_fastest([improved(question, pool.request.space, fitting, pool.budget)] if fitting else [])


def improved(question: Question, space: PlanSpace, starts: Sequence[ExecutionPlan], budget: Budget) -> ExecutionPlan:
    """Return the best result of a local search from each start; unused time goes to the other starts."""
    meter, found = Meter(budget), []
    for index, start in enumerate(starts):
        share = Meter(meter.left.times(1 / (len(starts) - index)))
        found.append(improve_locally(question, replace(start, name="auto"), space, share))
        meter.spend(share.spent)
    return min(found, key=question.seconds)


def _starts(
    question: Question, timed: Iterable[Timed], count: int, taking_turns: Sequence[ExecutionPlan] = ()
) -> list[ExecutionPlan]:
    """Make the fastest `2 * count` plans resident if possible, then return the fastest `count`.

    The fastest of `taking_turns` made resident is a further start on up to `MOST_DEVICES`: its offloads hide how fast
    its meshes and strategies are.
    """

    def resident(plans: Iterable[ExecutionPlan]) -> list[Timed]:
        staying = (keep_resident_where_free(question, plan) for plan in plans)
        return [(plan, question.seconds(plan)) for plan in staying]

    near = resident(differently_placed(timed)[: 2 * count])
    turns = resident(taking_turns if question.site.mesh.num_devices <= MOST_DEVICES else ())
    fastest, further = differently_placed(near + turns)[:count], differently_placed(turns)[:1]
    return [*fastest, *(plan for plan in further if plan.placements not in [each.placements for each in fastest])]
