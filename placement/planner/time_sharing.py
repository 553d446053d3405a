"""Plans that offload every model while others use its devices, for models that fit only one at a time.

A copy of trained weights needs room for both at once while it is made. So such a plan either generates with the trained
weights, in their layout, or keeps the copy on other devices.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace

from prefect_rlhf.placement.graph import Call
from prefect_rlhf.placement.layout.sharing import one_base
from prefect_rlhf.placement.memory.savings import with_changes
from prefect_rlhf.placement.plan import ExecutionPlan, instances
from prefect_rlhf.placement.planner.planned import ROUNDING
from prefect_rlhf.placement.planner.question import Question
from prefect_rlhf.placement.planner.space.candidates import Candidate, CostContext, MemoryBounds, host_seconds
from prefect_rlhf.placement.planner.space.plan_problem import PlanProblem, PlanSpace, plan_problem


def time_sharing_problem(space: PlanSpace) -> PlanProblem:
    """Return the problem in which a model stays, or comes for a call and leaves after it, while its devices wait."""
    context = space.context
    choices: dict[str, tuple[Candidate, ...]] = {}
    for name, options in space.candidates.items():
        call = context.graph.call(name)
        staying = [option for option in options if option.placement.offload == "none"]
        choices[name] = tuple(_offloaded_around(call, option, context) for option in staying)
        if call.kind != "train_step":
            choices[name] += tuple(replace(_as_placed(option), least=option.most) for option in staying)
    return plan_problem(context, choices)


def keep_resident_where_free(question: Question, plan: ExecutionPlan) -> ExecutionPlan:
    """Keep each copy of weights resident, or all of it but the optimizer, if that costs no time.

    If it must leave, reload it during the preceding call, if there is room. Copies that share a base stay together.
    """
    most_seconds = question.seconds(plan) * (1 + ROUNDING)
    users = instances(question.graph, plan)
    with_base = {instance: alike for alike in one_base(question.graph, plan) for instance in alike}
    for together in dict.fromkeys(with_base.get(instance, (instance,)) for instance in users):
        for changed in _more_resident(plan, [users[instance] for instance in together]):
            if changed == plan:
                break  # what follows stays less
            if question.fits(changed) and question.seconds(changed) <= most_seconds:
                plan = changed
                break
    return plan


def _more_resident(plan: ExecutionPlan, copies: Sequence[Sequence[Call]]) -> Iterator[ExecutionPlan]:
    """Plans with more of some copies on their devices, the most first; `copies` are the calls of each."""
    trained = [any(call.kind == "train_step" for call in calls) for calls in copies]
    for part in ("none", "optimizer") if any(trained) else ("none",):
        changed = plan
        for calls, trains in zip(copies, trained, strict=True):
            changed = with_changes(changed, calls, offload=part if trains else "none", prefetch=True)
        yield changed
    if not all(plan[calls[0].name].prefetch for calls in copies):
        yield with_changes(plan, [call for calls in copies for call in calls], prefetch=True)


def _offloaded_around(call: Call, option: Candidate, context: CostContext) -> Candidate:
    """The option with its weights, or all that its training keeps, brought before the call and taken away after it.

    Gradients do not cross the host link: they come back as zeros.
    """
    placement, least = replace(option.placement, offload="all"), MemoryBounds(0, option.most.peak)
    seconds = option.seconds + sum(host_seconds(call, placement, context))
    return replace(_as_placed(option), placement=placement, least=least, seconds=seconds)


def _as_placed(option: Candidate) -> Candidate:
    """The option with the seconds and bytes of its own number of recomputed layers."""
    return replace(option, spared_seconds=0.0, fullest_bytes=option.most.peak)
