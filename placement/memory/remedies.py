"""Remedies: the smallest changes that make a plan fit, as flags of a command, each proved by a certificate."""

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from prefect_rlhf.errors.errors import PlanDoesNotFit, RlhfError
from prefect_rlhf.placement.cost.workload import Workload
from prefect_rlhf.placement.devices.mesh import Backend
from prefect_rlhf.placement.graph import DataflowGraph
from prefect_rlhf.placement.layout.experts import with_expert_degrees
from prefect_rlhf.placement.memory.bytes import byte_size
from prefect_rlhf.placement.memory.certificate import Certificate
from prefect_rlhf.placement.memory.hosts import fullest_host
from prefect_rlhf.placement.memory.savings import Savings, with_changes
from prefect_rlhf.placement.plan import ExecutionPlan, instances
from prefect_rlhf.placement.plans.check import check_plan
from prefect_rlhf.placement.plans.stated_words import flags

REMEDIES_SHOWN = 3
ROUNDS_OF_SPLITS = 4  # a model that no single node holds after so many is no small change away


@dataclass(frozen=True, slots=True)
class Remedy:
    """A change that makes a plan fit: the words to paste, the changed plan, and its memory use."""

    change: str
    plan: ExecutionPlan
    certificate: Certificate

    @property
    def peak_bytes(self) -> int:
        return self.certificate.fullest.num_bytes if self.certificate.fullest else 0

    def __str__(self) -> str:
        return f"{self.change}: peak {byte_size(self.peak_bytes)}"


def remedies(plan: ExecutionPlan, graph: DataflowGraph, workload: Workload, backend: Backend) -> list[Remedy]:
    """Return changes that make a plan fit, the smallest first: savings, then models split further, with savings."""
    savings = Savings(graph, workload, backend)
    found = [fitted] if (fitted := savings.least(plan)) is not None else []
    if not found:
        found = list(_split_further(plan, savings))[:REMEDIES_SHOWN]
    return [Remedy(flags(plan, each, graph), each, savings.certificate(each)) for each in found]


def refusal(
    plan: ExecutionPlan, certificate: Certificate, proposed: Sequence[Remedy], otherwise: str = ""
) -> PlanDoesNotFit:
    """Return the error that says which of `proposed` helps, and lists the contents of the fullest device.

    If `proposed` is empty, it gives `otherwise` as the advice.
    """
    fullest, host = certificate.fullest, fullest_host(certificate.hosts)
    assert fullest is not None  # an empty plan fits
    where, seen = f"memory of {fullest.device}", f"{byte_size(fullest.num_bytes)} at {fullest.node}"
    room, without = fullest.device_bytes, otherwise or "no change that was tried suffices: more or larger devices"
    if host is not None and host.excess_bytes and fullest.num_bytes <= room:
        where = f"memory of the host of n{host.node}"
        seen = f"{byte_size(host.num_bytes)} offloaded or copied for a checkpoint"
        room = host.host_bytes
        without = "hosts with more memory (host_memory_gib), more nodes, or smaller models"
    changes = "\n".join(f"  {remedy}" for remedy in proposed) or f"  {without}"
    hint = f"it fits with {proposed[0].change}" if proposed else without
    as_json = [{"change": r.change, "peak_bytes": r.peak_bytes, "fits": r.certificate.fits} for r in proposed]
    return PlanDoesNotFit(
        f"plan {plan.name}: {where}",
        seen,
        f"at most {byte_size(room)}; {hint}",
        f"What would make it fit:\n{changes}\n{certificate.table()}",
        json.dumps({"certificate": json.loads(certificate.to_json()), "remedies": as_json}),
    )


def _split_further(plan: ExecutionPlan, savings: Savings) -> Iterator[ExecutionPlan]:
    """Yield plans that fit because the models on the fullest device are split over more devices, as few as suffice."""
    reached = [plan]
    for _ in range(ROUNDS_OF_SPLITS):
        reached = [split for each in reached for split in _splits(each, savings)]
        reached.sort(key=lambda split: savings.certificate(savings.all_of(split)[-1]).excess_bytes)
        fitting = [fitted for split in reached if (fitted := savings.least(split)) is not None]
        if fitting:
            yield from fitting
            return
        reached = reached[:REMEDIES_SHOWN]


def _splits(plan: ExecutionPlan, savings: Savings) -> Iterator[ExecutionPlan]:
    """Yield legal plans with a copy on the fullest device split over twice the devices, or with its experts divided."""
    graph, fullest = savings.graph, savings.certificate(savings.all_of(plan)[-1]).fullest
    for instance, calls in instances(graph, plan).items():
        if fullest is None or fullest.device not in map(str, instance.mesh.devices()):
            continue
        strategy = instance.strategy
        model = graph.model(instance.role)
        options = [each for each in with_expert_degrees(strategy, model, instance.engine) if each.ep > strategy.ep]
        if strategy.dp % 2 == 0:
            half = strategy.dp // 2
            options += [replace(strategy, dp=half, tp=2 * strategy.tp), replace(strategy, dp=half, pp=2 * strategy.pp)]
        for option in options:
            changed = with_changes(plan, calls, strategy=option)
            try:
                yield check_plan(changed, graph, plan.cluster.whole)
            except RlhfError:  # not legal: no remedy
                continue
