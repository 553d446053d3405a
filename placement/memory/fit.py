"""Whether a plan fits its devices, and what would make it fit: changes of the plan, each counted by a certificate."""

from __future__ import annotations

from prefect_rlhf.placement.cost.workload import LengthDistribution, Workload
from prefect_rlhf.placement.graph import DataflowGraph
from prefect_rlhf.placement.lease import Backend
from prefect_rlhf.placement.memory.certificate import Certificate, certify_plan
from prefect_rlhf.placement.memory.remedies import (
    _changed,
    refusal,
    remedies,
)
from prefect_rlhf.placement.plan import ExecutionPlan, ModelInstance, instances

DEFAULT_SEQUENCE_LENGTH = 1024  # tokens of the longest row, where nobody says


def check_memory(
    plan: ExecutionPlan,
    graph: DataflowGraph,
    max_sequence_length: int = DEFAULT_SEQUENCE_LENGTH,
    kind: Backend = "cuda",
) -> ExecutionPlan:
    """Return `plan`, or raise PlanDoesNotFit: what fills the devices, and which changes would make it fit."""
    check_fits(plan, graph, longest_rows(graph, max_sequence_length), kind)
    return plan


def check_fits(plan: ExecutionPlan, graph: DataflowGraph, workload: Workload, kind: Backend) -> Certificate:
    """The proof that `plan` fits, or PlanDoesNotFit."""
    certificate = certify_plan(plan, graph, workload, kind)
    if certificate.fits:
        return certificate
    raise refusal(plan, certificate, remedies(plan, graph, workload, kind))


def fits(plan: ExecutionPlan, graph: DataflowGraph, max_sequence_length: int, kind: Backend) -> bool:
    """Whether a run of the plan stays within the memory of its devices."""
    return certify_plan(plan, graph, longest_rows(graph, max_sequence_length), kind).fits


def offload_to_fit(
    plan: ExecutionPlan,
    graph: DataflowGraph,
    max_sequence_length: int = DEFAULT_SEQUENCE_LENGTH,
    kind: Backend = "cuda",
) -> ExecutionPlan:
    """Offload frozen instances, the largest first, until the plan fits; all of them when it never does.

    Trained roles stay: what they would have to move, optimizer states and all, is needed in every step. One alone may
    not help, since it may still be on its way when the next call begins; two take turns.
    """
    workload = longest_rows(graph, max_sequence_length)
    certificate = certify_plan(plan, graph, workload, kind)
    users = instances(graph, plan)
    frozen = [instance for instance in users if graph.trained_by(instance.role) is None]
    for instance in sorted(frozen, key=lambda instance: -_held_bytes(certificate, instance)):
        if certificate.fits:
            break
        plan = _changed(plan, users[instance], offload="all")
        certificate = certify_plan(plan, graph, workload, kind)
    return plan


def longest_rows(graph: DataflowGraph, max_sequence_length: int) -> Workload:
    """Worst case: every row has the maximum length, its response the maximum new tokens."""
    limits = [call.max_new_tokens for call in graph if call.kind == "generate"]
    new = [limit for limit in limits if limit] or [max_sequence_length]
    prompts = max(0, max_sequence_length - min(new)) or max_sequence_length * bool(limits)
    return Workload(LengthDistribution.fixed(prompts), LengthDistribution.fixed(min(max_sequence_length, max(new))))


def _held_bytes(certificate: Certificate, instance: ModelInstance) -> int:
    shares = (share for peak in certificate.peaks for share in peak.shares)
    return sum(share.num_bytes for share in shares if share.owner == instance.name)
