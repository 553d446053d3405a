"""The error for a question that no plan fits: the memory use, and the remedies."""

from collections.abc import Iterator
from dataclasses import replace
from math import ceil
from typing import Any

from prefect_rlhf.errors.errors import PlanDoesNotFit, TooLittleMemory
from prefect_rlhf.placement.graph import Call
from prefect_rlhf.placement.memory.bytes import base_bytes, byte_size, enough_bytes
from prefect_rlhf.placement.memory.certificate import Certificate
from prefect_rlhf.placement.memory.remedies import Remedy, refusal
from prefect_rlhf.placement.memory.savings import with_changes
from prefect_rlhf.placement.plan import ExecutionPlan
from prefect_rlhf.placement.planner.preset_plan import some_preset_fits
from prefect_rlhf.placement.planner.question import Question
from prefect_rlhf.placement.planner.solution import fitting, made_to_fit, solution, solutions, with_prefetch
from prefect_rlhf.placement.planner.space.plan_problem import PlanProblem, PlanSpace
from prefect_rlhf.placement.planner.time_sharing import time_sharing_problem
from prefect_rlhf.placement.search.budget import Budget
from prefect_rlhf.placement.search.driver import search
from prefect_rlhf.placement.words.table import WORDS
from prefect_rlhf.placement.words.word import Word

FEW_SHARES = (1.0, 0.96, 0.9, 0.8)  # of the memory, to find any plan that fits
LARGER = (1.1, 1.25, 1.5, 2.0, 3.0, 5.0, 8.0)  # shares of memory beyond what there is, to say how much is missing


def no_plan_fits(question: Question, space: PlanSpace, budget: Budget) -> TooLittleMemory:
    """Report the missing memory: the need of the first plan that a search with time sharing finds in more memory."""
    problem, part = time_sharing_problem(space), budget.times(1 / len(LARGER))
    by_hosts = _hosts_too_small(question, problem, part)
    if by_hosts is not None:
        return by_hosts
    for share in LARGER:
        larger = problem.with_memory(share).problem
        plan = solution(question, problem, search(larger, part.seconds, max_evaluations=part.evaluations))
        if plan is not None and not (certificate := question.certificate(plan)).fits:
            return _too_large(question, plan, certificate)
    seen = f"more than {LARGER[-1]:.0f} times the memory"
    return TooLittleMemory(f"plan of {question.graph.name}", seen, "a plan that fits the devices: more devices")


def has_fitting_plan(question: Question, budget: Budget) -> bool:
    """Whether a preset has a plan that fits, or a short search finds one, first with time sharing, then of all plans.

    A plan that it finds may be repaired, or have all its layers recomputed. `False` does not prove that no plan fits.
    """
    if some_preset_fits(question):
        return True
    try:
        plans = _short_searches(question, PlanSpace.of(question), budget)
        return any(made_to_fit(question, plan) or fitting(question, _recomputing(question, plan)) for plan in plans)
    except TooLittleMemory:
        return False


def _short_searches(question: Question, space: PlanSpace, budget: Budget) -> Iterator[ExecutionPlan]:
    """Yield plans that short searches find; the problem of all plans is built only if time sharing was not enough."""
    yield from solutions(question, time_sharing_problem(space), budget, FEW_SHARES)
    yield from solutions(question, space.most, budget, FEW_SHARES)


def _hosts_too_small(question: Question, problem: PlanProblem, budget: Budget) -> PlanDoesNotFit | None:
    """The refusal of a plan that fits the devices and not their hosts, if a short search finds such a plan."""
    if question.site.cluster.host_memory_bytes == 0:
        return None
    for found in solutions(question, problem, budget, FEW_SHARES):
        for plan in (found, with_prefetch(question, found, prefetch=False)):
            certificate = question.certificate(plan)
            if all(peak.num_bytes <= peak.device_bytes for peak in certificate.peaks) and not certificate.fits:
                return refusal(plan, certificate, [])
    return None


def _recomputing(question: Question, plan: ExecutionPlan) -> ExecutionPlan:
    """The plan with all layers of each train_step recomputed, if its engine can."""
    for call, word in _late_savings(question, plan):
        value = word.values(call, plan[call.name], question.graph)[-1]
        plan = with_changes(plan, (call,), **{word.name: value})
    return plan


def _late_savings(question: Question, plan: ExecutionPlan) -> list[tuple[Call, Word[Any]]]:
    """The words that the calls of a plan may have and that cost the most time, such as recomputed layers."""
    late = [word for word in WORDS.values() if word.saves == "later"]
    return [(call, word) for word in late for call in question.graph if word.may_have(call, plan[call.name].engine)]


def _too_large(question: Question, plan: ExecutionPlan, certificate: Certificate) -> PlanDoesNotFit:
    """State the memory use under the nearest plan, and the device memory that it needs."""
    peak = certificate.fullest
    assert peak is not None  # an empty plan fits
    if peak.num_bytes <= peak.device_bytes:
        return refusal(plan, certificate, [])  # its hosts are too small
    backend = question.site.backend
    filled = max(peak.num_bytes - sum(base_bytes(peak.device_bytes, backend).values()) for peak in certificate.peaks)
    enough = enough_bytes(ceil(filled / (1 - plan.cluster.kept_share)), backend)
    larger = replace(plan, cluster=replace(plan.cluster, device_memory_bytes=enough, node_memory_bytes=()))
    remedy = Remedy(f"devices of {byte_size(enough)}", larger, question.certificate(larger))
    shown = refusal(plan, certificate, [remedy])
    missing, within = byte_size(peak.num_bytes - peak.device_bytes), byte_size(peak.device_bytes)
    by = "more or larger devices, shorter rows, or smaller models"
    if _late_savings(question, plan):
        by += "; no plan was found with recomputation of layers either"
    return PlanDoesNotFit(
        f"plan of {question.graph.name}",
        f"{byte_size(peak.num_bytes)} on {peak.device} at {peak.node}",
        f"a plan within the {within} of each device; save {missing} by {by}",
        shown.report,
        shown.details,
    )
