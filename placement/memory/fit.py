"""Whether a plan fits its devices: the certificate says so, or the plan is refused with what would make it fit."""

from collections import Counter

from prefect_rlhf.placement.cost.workload import LengthDistribution, Workload
from prefect_rlhf.placement.devices.mesh import Backend
from prefect_rlhf.placement.graph import DataflowGraph
from prefect_rlhf.placement.memory.certificate import Certificate, certify_plan
from prefect_rlhf.placement.memory.remedies import refusal, remedies, with_changes
from prefect_rlhf.placement.plan import ExecutionPlan, instances


def check_fits(plan: ExecutionPlan, graph: DataflowGraph, workload: Workload, backend: Backend) -> Certificate:
    """Return the proof that `plan` fits, or raise PlanDoesNotFit with the memory use and the changes that help."""
    certificate = certify_plan(plan, graph, workload, backend)
    if certificate.fits:
        return certificate
    raise refusal(plan, certificate, remedies(plan, certificate, graph, workload, backend))


def offload_to_fit(
    plan: ExecutionPlan, graph: DataflowGraph, workload: Workload, backend: Backend
) -> tuple[ExecutionPlan, Certificate]:
    """Offload frozen instances, the largest first, until the plan fits; all of them if it never does.

    Trained roles stay resident: every step needs the weights and optimizer states that they would have to move. A
    single offload may not help, because its copy may still be under way when the next call begins; two instances
    alternate.
    """
    certificate = certify_plan(plan, graph, workload, backend)
    users = instances(graph, plan)
    frozen = [instance for instance in users if graph.trained_by(instance.role) is None]
    held = Counter[str]()
    for share in (share for peak in certificate.peaks for share in peak.shares):
        held[share.owner] += share.num_bytes
    for instance in sorted(frozen, key=lambda instance: -held[instance.name]):
        if certificate.fits:
            break
        plan = with_changes(plan, users[instance], offload="all")
        certificate = certify_plan(plan, graph, workload, backend)
    return plan, certificate


def longest_rows(graph: DataflowGraph, max_sequence_length: int) -> Workload:
    """Return the worst case: every row has the maximum length, its response the maximum of new tokens."""
    limits = [call.max_new_tokens for call in graph if call.kind == "generate"]
    new = [limit for limit in limits if limit] or [max_sequence_length]
    prompts = max(0, max_sequence_length - min(new)) or max_sequence_length * bool(limits)
    return Workload(LengthDistribution.fixed(prompts), LengthDistribution.fixed(min(max_sequence_length, max(new))))
