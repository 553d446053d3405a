"""Remedies: changes that would make a plan fit, each counted by a certificate of its own."""

import json
from collections.abc import Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, replace

from prefect_rlhf.errors.errors import PlanDoesNotFit, RlhfError
from prefect_rlhf.placement.cost.paged_cache import gib_above
from prefect_rlhf.placement.cost.workload import Workload
from prefect_rlhf.placement.devices.mesh import Backend
from prefect_rlhf.placement.engine_traits import TRAITS
from prefect_rlhf.placement.graph import Call, DataflowGraph
from prefect_rlhf.placement.layout.experts import with_expert_degrees
from prefect_rlhf.placement.memory.bytes import byte_size
from prefect_rlhf.placement.memory.certificate import Certificate, certify_plan
from prefect_rlhf.placement.memory.hosts import fullest_host
from prefect_rlhf.placement.plan import ExecutionPlan, ModelInstance, Placement, instances
from prefect_rlhf.placement.plans.check import check_plan

REMEDIES_SHOWN = 5
SMALLER_CACHES = (0.5, 0.25, 0.125)  # of vLLM's bytes
CHANGES_AT_MOST = 6  # that are tried together


@dataclass(frozen=True, slots=True)
class Remedy:
    """A changed plan, a description of the change, and the plan's memory use."""

    change: str
    plan: ExecutionPlan
    certificate: Certificate

    @property
    def peak_bytes(self) -> int:
        return self.certificate.fullest.num_bytes if self.certificate.fullest else 0

    def __str__(self) -> str:
        verdict = "fits" if self.certificate.fits else "does not fit yet"
        return f"{self.change}: peak {byte_size(self.peak_bytes)}, {verdict}"


def remedies(
    plan: ExecutionPlan, certificate: Certificate, graph: DataflowGraph, workload: Workload, backend: Backend
) -> list[Remedy]:
    """Return changes that help, the best first; if no single change suffices, also combinations of changes."""

    def single(plan: ExecutionPlan, now: Certificate) -> Iterator[Remedy]:
        """Legal changes of an instance, or of a call's micro-batches, that bring the plan nearer to fitting."""
        for change, changed in _changes(plan, graph, now):
            try:
                check_plan(changed, graph, plan.cluster.whole)
                after = certify_plan(changed, graph, workload, backend)
            except RlhfError:  # not legal: no remedy
                continue
            if after.excess_bytes < now.excess_bytes:
                yield Remedy(change, changed, after)

    shown = sorted(single(plan, certificate), key=_excess)[:REMEDIES_SHOWN]
    if not shown or shown[0].certificate.fits:
        return shown
    best = shown[0]
    for _ in range(CHANGES_AT_MOST - 1):
        further = min(single(best.plan, best.certificate), key=_excess, default=None)
        if further is None:
            break
        best = replace(further, change=f"{best.change}; {further.change}")
        if best.certificate.fits:
            break
    return [*shown, best]


def refusal(plan: ExecutionPlan, certificate: Certificate, proposed: Sequence[Remedy]) -> PlanDoesNotFit:
    """Return the error that states the contents of the fullest device, and which of `proposed` help."""
    fullest, host = certificate.fullest, fullest_host(certificate.hosts)
    assert fullest is not None  # an empty plan fits
    where, seen = f"memory of {fullest.device}", f"{byte_size(fullest.num_bytes)} at {fullest.node}"
    room, without = fullest.device_bytes, "no change of this plan suffices: more or larger devices"
    if host is not None and host.excess_bytes and fullest.num_bytes <= room:
        where = f"memory of the host of n{host.node}"
        seen = f"{byte_size(host.num_bytes)} offloaded or copied for a checkpoint"
        room = host.host_bytes
        without = "hosts with more memory (host_memory_gib), more nodes, or smaller models"
    changes = "\n".join(f"  {remedy}" for remedy in proposed) or f"  {without}"
    helps = next((remedy.change for remedy in proposed if remedy.certificate.fits), "")
    hint = f"it fits with {helps}" if helps else without
    as_json = [{"change": r.change, "peak_bytes": r.peak_bytes, "fits": r.certificate.fits} for r in proposed]
    return PlanDoesNotFit(
        f"plan {plan.name}: {where}",
        seen,
        f"at most {byte_size(room)}; {hint}",
        f"{certificate.table()}\nWhat would make it fit:\n{changes}",
        json.dumps({"certificate": json.loads(certificate.to_json()), "remedies": as_json}),
    )


def with_changes(plan: ExecutionPlan, calls: Sequence[Call], **fields: object) -> ExecutionPlan:
    """Return the plan with fields of some calls' placements changed."""
    names = {call.name for call in calls}

    def change(old: Placement) -> Placement:
        order = () if "strategy" in fields else old.device_order
        return replace(old, **{"device_order": order, **fields})  # type: ignore[arg-type]  # names of Placement's fields

    return replace(plan, placements=tuple((n, change(old) if n in names else old) for n, old in plan.placements))


def _excess(remedy: Remedy) -> tuple[int, int]:
    return remedy.certificate.excess_bytes, remedy.peak_bytes


def _changes(
    plan: ExecutionPlan, graph: DataflowGraph, certificate: Certificate
) -> Iterator[tuple[str, ExecutionPlan]]:
    """Changes that might help the fullest device: offload, split an instance there further, cut finer,
    recompute, cache less.
    """
    device = certificate.fullest.device if certificate.fullest else ""
    there = {
        instance: calls
        for instance, calls in instances(graph, plan).items()
        if device in map(str, instance.mesh.devices())
    }
    yield from _offloads(plan, graph, there)
    for instance, calls in there.items():
        names = ", ".join(call.name for call in calls)
        strategy = instance.strategy
        if strategy.dp % 2 == 0:
            half = strategy.dp // 2
            for split in (
                replace(strategy, dp=half, tp=2 * strategy.tp),
                replace(strategy, dp=half, pp=2 * strategy.pp),
            ):
                yield f"{split} for {names}", with_changes(plan, calls, strategy=split)
        for spread in with_expert_degrees(strategy, graph.model(instance.role), instance.engine):
            if spread.ep > strategy.ep:
                yield f"{spread} for {names}", with_changes(plan, calls, strategy=spread)
        if TRAITS[instance.engine].micro_batches:
            yield from _fewer_activations(plan, instance, calls)
        elif cached := _cached(certificate, instance):
            for share in SMALLER_CACHES:
                gib = gib_above(cached * share)
                yield f"cache_gib {gib:g} for {names}", with_changes(plan, calls, cache_gib=gib)


def _fewer_activations(
    plan: ExecutionPlan, instance: ModelInstance, calls: Sequence[Call]
) -> Iterator[tuple[str, ExecutionPlan]]:
    """More micro-batches of each call, and recomputation of each train_step."""
    for call in calls:
        count = 2 * plan[call.name].micro_batches
        yield f"micro_batches {count} for {call.name}", with_changes(plan, [call], micro_batches=count)
        if call.kind == "train_step" and TRAITS[instance.engine].recomputes:
            yield f"recompute all for {call.name}", with_changes(plan, [call], recompute="all")


def _cached(certificate: Certificate, instance: ModelInstance) -> int:
    """Bytes of an instance's key-value cache on the fullest device; 0 if it is absent at the fullest moment."""
    shares = certificate.fullest.shares if certificate.fullest else ()
    return sum(share.num_bytes for share in shares if (share.owner, share.what) == (instance.name, "key-value cache"))


def _offloads(
    plan: ExecutionPlan, graph: DataflowGraph, there: Mapping[ModelInstance, Sequence[Call]]
) -> Iterator[tuple[str, ExecutionPlan]]:
    """Groups that alternate on the device: frozen instances, optimizers, copies that generate, and all of these.

    A single member seldom helps, because its copy to the host may still be under way when the next call begins.
    """
    trains = {i for i, calls in there.items() if any(call.kind == "train_step" for call in calls)}
    copies = {i for i in there if i not in trains and graph.trained_by(i.role) is not None}
    frozen = there.keys() - trains - copies
    groups: tuple[tuple[Set[ModelInstance], Set[ModelInstance]], ...] = (
        (frozen, set()),
        (set(), trains),
        (frozen | copies, set()),
        (frozen | copies, trains),
        (frozen | copies | trains, set()),
    )
    for whole, optimizers in groups:
        changed, words = plan, []
        for instance, part in [
            *((i, "all") for i in there if i in whole),
            *((i, "optimizer") for i in there if i in optimizers),
        ]:
            if plan[there[instance][0].name].offload not in ("all", part):
                changed = with_changes(changed, there[instance], offload=part)
                words.append(f"offload {part} of {instance.role}.{instance.engine}")
        if words:
            yield ", ".join(words), changed
