"""A question's plan, from a solution of a single search problem.

A plan that does not fit is repaired: as few of its weights as possible leave their devices between uses.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace

from prefect_rlhf.errors.errors import InvalidInput, RlhfError
from prefect_rlhf.placement.layout.sharing import one_base
from prefect_rlhf.placement.memory.certificate import Certificate
from prefect_rlhf.placement.memory.savings import Savings, with_changes
from prefect_rlhf.placement.plan import ExecutionPlan, instances, offloaded_parts
from prefect_rlhf.placement.planner.question import Question
from prefect_rlhf.placement.planner.space.plan_problem import PlanProblem
from prefect_rlhf.placement.plans.check import check_plan
from prefect_rlhf.placement.plans.stated_words import Words, as_stated, names_of, with_words
from prefect_rlhf.placement.search.budget import Budget
from prefect_rlhf.placement.search.driver import Proof, SearchResult, search
from prefect_rlhf.placement.search.method import Method
from prefect_rlhf.placement.search.partial.incumbent import SearchOutcome

TIGHTER = (1.0, 0.98, 0.96, 0.94, 0.92, 0.9, 0.85, 0.8)
"""Shares of memory to search in, where a problem counts nearly all that a certificate does."""


STEPS = 10


def repaired(question: Question, plan: ExecutionPlan) -> ExecutionPlan | None:
    """Offload copies, or reload them later, until the plan fits; return None if that does not suffice.

    Single copies are offloaded, the largest at the fullest moment first, as long as each reduces the missing bytes.
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
    users = instances(question.graph, plan)
    by_name = {instance.name: calls for instance, calls in users.items()}
    with_base = {instance.name: alike for alike in one_base(question.graph, plan) for instance in alike}
    for name in dict.fromkeys(share.owner for share in largest_first if share.owner in by_name):
        calls = by_name[name]
        now = plan[calls[0].name]
        is_trained = any(call.kind == "train_step" for call in calls)
        for part in ("optimizer", "all") if is_trained else ("all",):
            together = with_base.get(name, ()) if part == "all" else ()
            leaving = tuple(call for each in together for call in users[each]) or calls
            for prefetch in (True, False):
                changed = with_changes(plan, leaving, offload=part, prefetch=prefetch)
                if (now.offload, now.prefetch) != (part, prefetch) and is_legal(question, changed):
                    yield changed


def is_legal(question: Question, plan: ExecutionPlan) -> bool:
    """Whether a plan may run, regardless of memory."""
    try:
        check_plan(plan, question.graph, question.site.mesh)
    except RlhfError:
        return False
    return True


def fitting(question: Question, plan: ExecutionPlan) -> ExecutionPlan | None:
    """Return the plan if it fits, or without prefetch if that fits, or else None."""
    late = with_prefetch(question, plan, prefetch=False)
    return next((changed for changed in (plan, late) if question.fits(changed)), None)


def made_to_fit(question: Question, plan: ExecutionPlan) -> ExecutionPlan | None:
    """Return the plan if it fits, else the faster of its variants without prefetch and repaired; None if neither
    fits.
    """
    fitted = fitting(question, plan)
    if fitted == plan:
        return plan
    others = (other for other in (fitted, repaired(question, plan)) if other is not None)
    return min(others, key=question.seconds, default=None)


def keeping_words(
    question: Question, plan: ExecutionPlan, others: Iterable[ExecutionPlan], words: Words
) -> ExecutionPlan:
    """Return the fastest of `others`, which have the stated words, and of `plan` changed to have them, if it fits.

    Raises InvalidInput if no plan with these words fits.
    """
    if not words:
        return plan
    found = list(others)
    changed = with_words(plan, question.graph, words)
    refused: RlhfError | None = None
    try:
        check_plan(changed, question.graph, question.site.mesh)
    except RlhfError as error:
        refused = as_stated(error, words) if isinstance(error, InvalidInput) else error
    else:
        saved = Savings(question.graph, question.workload, question.site.backend, names_of(words)).least(changed)
        found += [replace(saved, name=plan.name)] if saved is not None else []
    if not found and refused is not None:
        raise refused
    if not found:
        stated = ", ".join(f"{call}.{word}" for call, word in sorted(names_of(words)))
        raise InvalidInput("placement", stated, "words with which a plan fits; state fewer, or others")
    best = min(found, key=question.seconds)
    return replace(best, name=plan.name)


def with_prefetch(question: Question, plan: ExecutionPlan, prefetch: bool) -> ExecutionPlan:
    """Return the plan that reloads all offloaded parts during the preceding call, or no part if `prefetch` is false."""
    for instance in offloaded_parts(question.graph, plan):
        plan = with_changes(plan, instances(question.graph, plan)[instance], prefetch=prefetch)
    return plan


def solution(
    question: Question, problem: PlanProblem, result: SearchResult | Proof, name: str = "auto"
) -> ExecutionPlan | None:
    """Return the plan that a search found, in the form that would run; None if it found no plan."""
    return None if result.plan is None else question.plan(name, problem.placements(result.plan))


def solutions(
    question: Question,
    problem: PlanProblem,
    budget: Budget,
    shares: Sequence[float],
    method: Method = "exact",
    name: str = "auto",
) -> Iterator[ExecutionPlan]:
    """Search a problem with ever smaller shares of the memory, each with part of the budget; yield the plans found."""
    for share in shares:
        part = budget.times(1 / len(shares))
        result = search(problem.with_memory(share).problem, part.seconds, method, max_evaluations=part.evaluations)
        if result.outcome is SearchOutcome.INFEASIBLE:
            return  # so it is in less memory
        plan = solution(question, problem, result, name)
        if plan is not None:
            yield plan


def solve_fitting(
    question: Question,
    problem: PlanProblem,
    budget: Budget,
    method: Method = "exact",
    name: str = "auto",
    shares: Sequence[float] = (1.0,),
    repair: bool = True,
) -> ExecutionPlan | None:
    """Search a problem with ever smaller shares of the memory until its plan fits, with or without prefetch; None if
    never.

    With `repair`, return the fastest of that plan and those before it, made to fit.
    """
    found: list[ExecutionPlan] = []
    shares = shares[:1] if problem.num_plans == 1 else shares  # in less memory it is the same plan
    for plan in solutions(question, problem, budget, shares, method, name):
        fitted = fitting(question, plan)
        changed = made_to_fit(question, plan) if repair else fitted
        found += [changed] if changed is not None else []
        if fitted is not None:
            break
    return min(found, key=question.seconds, default=None)
