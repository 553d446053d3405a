"""Plans that do not fit, with as little of their weights taken away between uses as makes them fit."""

from collections.abc import Iterator

from prefect_rlhf.placement.errors import RlhfError
from prefect_rlhf.placement.memory.certificate import Certificate
from prefect_rlhf.placement.memory.remedies import with_changes
from prefect_rlhf.placement.plan import ExecutionPlan, instances
from prefect_rlhf.placement.planner.question import Question
from prefect_rlhf.placement.plans.check import check_plan

STEPS = 10


def repaired(question: Question, plan: ExecutionPlan) -> ExecutionPlan | None:
    """Return the plan with copies offloaded, or reloaded later, until it fits; None if that does not suffice.

    Single copies, the largest at the fullest moment first, as long as each reduces the missing bytes.
    """
    for _ in range(STEPS):
        certificate = question.certificate(plan)
        if certificate.fits:
            return plan
        changes = ((changed, question.certificate(changed)) for changed in _changes(question, plan, certificate))
        better = (changed for changed, after in changes if after.excess_bytes < certificate.excess_bytes)
        changed = next(better, None)
        if changed is None:
            return None
        plan = changed
    return plan if question.fits(plan) else None


def _changes(question: Question, plan: ExecutionPlan, certificate: Certificate) -> Iterator[ExecutionPlan]:
    """Legal plans that keep less of a copy that is resident at the fullest moment."""
    assert certificate.fullest is not None  # it does not fit
    largest_first = sorted(certificate.fullest.shares, key=lambda share: -share.num_bytes)
    by_name = {instance.name: calls for instance, calls in instances(question.graph, plan).items()}
    for name in dict.fromkeys(share.owner for share in largest_first if share.owner in by_name):
        calls = by_name[name]
        now = plan[calls[0].name]
        is_trained = any(call.kind == "train_step" for call in calls)
        for part in ("optimizer", "all") if is_trained else ("all",):
            for prefetch in (True, False):
                changed = with_changes(plan, calls, offload=part, prefetch=prefetch)
                if (now.offload, now.prefetch) != (part, prefetch) and _is_legal(question, changed):
                    yield changed


def _is_legal(question: Question, plan: ExecutionPlan) -> bool:
    try:
        check_plan(plan, question.graph, question.site.mesh)
    except RlhfError:
        return False
    return True
