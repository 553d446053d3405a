"""Refines a plan that a search chose: its micro-batches, recomputed layers and streamed parts.

Of equally fast plans the search chooses the smallest in memory, so with the most micro-batches, even if memory is free.
It tries few numbers of recomputed layers, and no streamed parts.
"""

from bisect import bisect_left
from collections.abc import Iterator
from dataclasses import replace

from prefect_rlhf.placement.engine_traits import TRAITS
from prefect_rlhf.placement.graph import Call
from prefect_rlhf.placement.memory.savings import with_changes
from prefect_rlhf.placement.plan import ExecutionPlan, Placement
from prefect_rlhf.placement.planner.passes.simplicity import is_nearly_full
from prefect_rlhf.placement.planner.question import Question
from prefect_rlhf.placement.planner.space.candidates import CostContext, candidate
from prefect_rlhf.placement.plans.check import violations
from prefect_rlhf.placement.plans.streaming import in_parts, streaming_calls
from prefect_rlhf.placement.words.table import WORDS

PARTS = (2, 4)  # numbers of streamed parts that are tried
STREAMED_GAIN = 0.02  # of an iteration: streamed parts that gain less are only more task runs


def with_least_recomputation(question: Question, plan: ExecutionPlan, context: CostContext) -> ExecutionPlan:
    """Return the plan with the fewest recomputed layers per stage for each train_step that let the plan fit.

    The same is done for every word that is a late saving. Its faster values need more memory, so bisection finds the
    fastest that fits.
    """
    for word in (word for word in WORDS.values() if word.saves == "later"):
        for call in context.graph:
            if word.of(plan[call.name]) != word.default:
                values = word.faster(call, plan[call.name], context.graph)
                faster = [with_changes(plan, (call,), **{word.name: value}) for value in values]
                fastest = bisect_left(faster, True, key=question.fits)
                plan = faster[fastest] if fastest < len(faster) else plan
    return plan


def with_fewest_cuts(question: Question, plan: ExecutionPlan, context: CostContext) -> ExecutionPlan:
    """Return the plan with the fewest micro-batches for each call (1, 2, 4, ...) that take no longer.

    No device becomes nearly full. Larger kernels are more efficient, which no estimate counts.
    """
    headroom = question.site.cluster.kept_share
    for call in context.graph:
        placed = plan[call.name]
        if TRAITS[placed.engine].micro_batches and placed.micro_batches > 1 and placed.mesh in context.space.meshes:
            for other in _in_fewer(call, placed, context):
                changed = with_changes(plan, (call,), micro_batches=other.micro_batches)
                if question.fits(changed) and not is_nearly_full(question.certificate(changed), headroom):
                    plan = changed
                    break
    return plan


def with_streamed_parts(question: Question, plan: ExecutionPlan) -> ExecutionPlan:
    """Return the plan with calls on disjoint devices cut into 2 or 4 parts, the faster, if an iteration gains 2%."""
    if not streaming_calls(question.graph, plan):
        return plan
    cut = [in_parts(question.graph, plan, parts) for parts in PARTS]
    best = min((each for each in cut if question.fits(each)), key=question.seconds, default=plan)
    return best if question.seconds(best) <= question.seconds(plan) * (1 - STREAMED_GAIN) else plan


def _in_fewer(call: Call, placed: Placement, context: CostContext) -> Iterator[Placement]:
    """The placement in fewer micro-batches, the fewest first, as long as it takes no longer."""
    seconds, count = candidate(call, placed, context).seconds, 1
    while count < placed.micro_batches:
        other = replace(placed, micro_batches=count)
        is_legal = not any(violations(call, other, context.graph, context.site.backend))
        if is_legal and candidate(call, other, context).seconds <= seconds:
            yield other
        count *= 2
