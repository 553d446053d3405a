"""Why a plan places each call as it does: the binding constraint, and the cost of the runner-up.

For each call, every other placement is ranked by the search's own problem, with all other calls unchanged. The first
that fits is the runner-up, and is estimated on its augmented graph, like the plan. A faster placement that does not fit
shows that memory is the constraint.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

from prefect_rlhf.placement.memory.bytes import byte_size
from prefect_rlhf.placement.plan import ExecutionPlan, Placement
from prefect_rlhf.placement.planner.neighbours import NEGLIGIBLE, Neighbour, changed_plan, neighbours
from prefect_rlhf.placement.planner.planned import Planned, differently_placed
from prefect_rlhf.placement.planner.question import Question
from prefect_rlhf.placement.schedule.schedule import slack_seconds
from prefect_rlhf.placement.words.table import phrases

PLACEMENTS_ESTIMATED = 6  # of a call, at most


@dataclass(frozen=True, slots=True)
class OtherPlacement:
    """A call's other placement: the iteration time with it, in seconds, and the fullest peak if it does not fit."""

    placement: Placement
    iteration_seconds: float
    peak_bytes: int | None = None


@dataclass(frozen=True, slots=True)
class Explanation:
    """A call's time in an iteration, and what would be faster."""

    call: str
    placement: Placement
    seconds: float
    slack_seconds: float
    """How much longer the call could take at no cost."""
    iteration_seconds: float
    device_bytes: int
    too_large: OtherPlacement | None
    """A placement that would be faster but does not fit."""
    runner_up: OtherPlacement | None
    """The best other placement that fits, or None."""

    def why(self) -> str:
        """Say which constraint binds the call."""
        critical = self.slack_seconds <= NEGLIGIBLE * self.iteration_seconds
        words = (
            "on the critical path: a second more of it makes the iteration a second longer"
            if critical
            else f"not on the critical path: it may take {self.slack_seconds:.3g} s longer"
        )
        if self.too_large is None or self.too_large.peak_bytes is None:
            return f"{words}; no other placement that was tried is faster"
        saved = self.iteration_seconds - self.too_large.iteration_seconds
        return (
            f"{words}; memory binds: {in_words(self.too_large.placement)} would save {saved:.3g} s, but needs "
            f"{byte_size(self.too_large.peak_bytes)} of {byte_size(self.device_bytes)}"
        )

    def costs(self) -> str:
        """Say how much slower the runner-up is."""
        if self.runner_up is None:
            return "no tried alternative fits"
        more = self.runner_up.iteration_seconds - self.iteration_seconds
        faster = ", faster by the estimate: the search counts moves of rows as 0 s" if more < 0 else ""
        return f"{in_words(self.runner_up.placement)}: {more:+.3f} s an iteration{faster}"


def explain(question: Question, planned: Planned) -> tuple[Explanation, ...]:
    """Explain the placement of each call with a model that runs in every iteration."""
    schedule = planned.estimate.schedule
    slack = slack_seconds(schedule)
    ranked, explanations = neighbours(planned.plan, planned.space), []
    for call in (call.name for call in question.graph if call.name in ranked):  # the problem has another order
        too_large, runner_up = _best_two(question, planned, call, ranked[call])
        explanations.append(
            Explanation(
                call,
                planned.plan[call],
                seconds=schedule.call_seconds(call),
                slack_seconds=min(slack[slot.node.id] for slot in schedule.of_call(call)),
                iteration_seconds=planned.seconds,
                device_bytes=planned.certificate.device_bytes,
                too_large=too_large,
                runner_up=runner_up,
            )
        )
    return tuple(explanations)


def in_words(placement: Placement) -> str:
    """Describe a placement, such as `n0:0-7 dp4 tp2 megatron, 8 micro-batches`."""
    return ", ".join((f"{placement.name} {placement.engine}", *phrases(placement)))


def _best_two(
    question: Question, planned: Planned, call: str, others: Iterable[Neighbour]
) -> tuple[OtherPlacement | None, OtherPlacement | None]:
    """The first that would be faster and does not fit, and the first that fits."""
    too_large: OtherPlacement | None = None
    tried = 0
    for other in others:
        placement = other.placement
        if tried == PLACEMENTS_ESTIMATED:
            break
        if not other.has_room and too_large is not None:
            continue
        changed = changed_plan(question, planned.plan, {call: placement})
        if changed is None:
            continue
        tried += 1
        placement = replace(placement, parts=changed[call].parts)
        certificate, changed_seconds = question.certificate(changed), question.seconds(changed)
        if certificate.fits:
            return too_large, OtherPlacement(placement, changed_seconds)
        if (
            too_large is None
            and changed_seconds < planned.seconds * (1 - NEGLIGIBLE)
            and certificate.fullest is not None
        ):
            too_large = OtherPlacement(placement, changed_seconds, certificate.fullest.num_bytes)
    return too_large, None


def next_best(question: Question, planned: Planned, count: int) -> list[ExecutionPlan]:
    """Return up to `count` different plans that fit, or fewer if the space has no more plans of interest."""
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
            plan = changed_plan(question, planned.plan, {explanation.call: explanation.runner_up.placement})
            assert plan is not None  # it was estimated
            yield ExecutionPlan(f"other {explanation.call}", plan.cluster, plan.placements)
