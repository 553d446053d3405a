"""The error of a question that has no plan: what fills the devices, and what would help."""

from __future__ import annotations

from dataclasses import replace

from prefect_rlhf.placement.errors import InvalidInput, PlanDoesNotFit
from prefect_rlhf.placement.memory.bytes import byte_size, enough_bytes
from prefect_rlhf.placement.memory.certificate import Certificate
from prefect_rlhf.placement.memory.remedies import Remedy, refusal
from prefect_rlhf.placement.plan import ExecutionPlan
from prefect_rlhf.placement.planner.plan_problem import PlanProblem
from prefect_rlhf.placement.planner.question import Planner
from prefect_rlhf.placement.search.driver import search
from prefect_rlhf.placement.search.problem import Problem

LARGER = (1.1, 1.25, 1.5, 2.0, 3.0, 5.0, 8.0)  # and beyond it, to say how much is missing


def _too_large(planner: Planner, posed: PlanProblem, budget_seconds: float) -> InvalidInput:
    """How much memory is missing: what the first plan needs that a search finds in more, where models take turns."""
    name = planner.graph.name
    for share in LARGER:
        found = search(_with_memory(posed.problem, share), budget_seconds / len(LARGER))
        plan = planner.plan("auto", posed, found)
        certificate = planner.certificate(plan) if plan else None
        if plan is not None and certificate is not None and not certificate.fits:
            return _refused(planner, plan, certificate)
    seen = f"more than {LARGER[-1]:.0f} times the memory"
    return InvalidInput(f"plan of {name}", seen, "a plan that fits the devices: more devices")


def _refused(planner: Planner, plan: ExecutionPlan, certificate: Certificate) -> PlanDoesNotFit:
    """What fills the devices under the plan that comes nearest, and how large they would have to be for it."""
    peak = certificate.fullest
    assert peak is not None  # an empty plan fits
    most = max(peak.num_bytes for peak in certificate.peaks)
    enough = replace(planner.cluster, device_memory_bytes=enough_bytes(most), node_memory_bytes=())
    larger = replace(plan, cluster=enough)
    fitting = replace(planner, cluster=enough).certificate(larger)
    shown = refusal(plan, certificate, [Remedy(f"devices of {byte_size(enough.device_memory_bytes)}", larger, fitting)])
    missing, within = byte_size(peak.num_bytes - peak.usable_bytes), byte_size(peak.usable_bytes)
    by = "more devices, larger ones, shorter rows, or smaller models"
    return PlanDoesNotFit(
        f"plan of {planner.graph.name}",
        f"{byte_size(peak.num_bytes)} on {peak.device} at {peak.node}",
        f"a plan within {within} of each device: {missing} less, by {by}",
        shown.report,
        shown.details,
    )


def _with_memory(problem: Problem, share: float) -> Problem:
    return replace(problem, device_bytes=tuple(int(size * share) for size in problem.device_bytes))
