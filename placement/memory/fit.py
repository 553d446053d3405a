"""Checks whether a plan fits its devices: returns its certificate, or refuses it and says what would make it fit."""

from prefect_rlhf.placement.cost.workload import LengthDistribution, Workload
from prefect_rlhf.placement.devices.mesh import Backend
from prefect_rlhf.placement.graph import DataflowGraph
from prefect_rlhf.placement.memory.certificate import Certificate, certify_plan
from prefect_rlhf.placement.memory.least_bytes import proved_too_large
from prefect_rlhf.placement.memory.remedies import refusal, remedies
from prefect_rlhf.placement.plan import ExecutionPlan


def check_fits(plan: ExecutionPlan, graph: DataflowGraph, workload: Workload, backend: Backend) -> Certificate:
    """Return the proof that `plan` fits, or raise PlanDoesNotFit with the smallest change that works.

    If it can be proved that no change works, the error says so (`proved_too_large`).
    """
    certificate = certify_plan(plan, graph, workload, backend)
    if certificate.fits:
        return certificate
    found = remedies(plan, graph, workload, backend)
    raise refusal(plan, certificate, found, "" if found else proved_too_large(graph, workload, plan.cluster, backend))


def longest_rows(graph: DataflowGraph, max_sequence_length: int) -> Workload:
    """Return the worst case: every row has the maximum length, with the maximum of new tokens in its response."""
    limits = [call.max_new_tokens for call in graph if call.kind == "generate"]
    new = [limit for limit in limits if limit] or [max_sequence_length]
    prompts = max(0, max_sequence_length - min(new)) or max_sequence_length * bool(limits)
    return Workload(LengthDistribution.fixed(prompts), LengthDistribution.fixed(min(max_sequence_length, max(new))))
