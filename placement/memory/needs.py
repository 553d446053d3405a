"""Needs: the bytes that a node of an augmented graph fills on its devices while it runs, and only then."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache, lru_cache
from math import ceil
from typing import assert_never

from prefect_rlhf.placement.augmented.augmented_graph import AugmentedGraph
from prefect_rlhf.placement.augmented.work import (
    Checkpoint,
    Commit,
    Compute,
    Export,
    HostCopy,
    ModelCall,
    Reallocate,
    Transfer,
)
from prefect_rlhf.placement.cost.call_bytes import call_bytes
from prefect_rlhf.placement.cost.execution import Execution
from prefect_rlhf.placement.cost.moves import reallocation_loads
from prefect_rlhf.placement.cost.sizes import ModelSizes
from prefect_rlhf.placement.cost.uneven import replica_works
from prefect_rlhf.placement.cost.workload import CallWork, Workload
from prefect_rlhf.placement.devices.mesh import Backend, Device
from prefect_rlhf.placement.engine_constants import BUCKET_BYTES
from prefect_rlhf.placement.engine_traits import TRAITS
from prefect_rlhf.placement.memory.holdings import ResidentBytes
from prefect_rlhf.placement.plan import ModelInstance, Placement, device_coordinates

STATIC_TERMS = ("weights", "gradients", "optimizer")  # of a call's bytes: kept by its instance
NOTHING: Mapping[str, int] = {}  # the terms of a device without needs


@dataclass(frozen=True, slots=True)
class ByteShare:
    """`num_bytes` of a kind on a device; `owner` names the instance, or the node that needs them while it runs."""

    owner: str
    what: str
    num_bytes: int
    passing: bool


@dataclass(frozen=True, slots=True, eq=False)  # devices with the same needs share an object, so identity is equality
class Need:
    """The bytes that a node needs on a device while it runs; `position` is the node's in the graph."""

    position: int
    node: str
    shares: tuple[ByteShare, ...]


def node_needs(
    augmented: AugmentedGraph, held: Mapping[Device, Sequence[ResidentBytes]], workload: Workload, backend: Backend
) -> dict[Device, list[Need]]:
    """Count the needs of each node on each of its devices; `held` are the bytes that instances keep there."""
    plan, needs = augmented.plan, defaultdict[Device, list[Need]](list)

    def sizes_of(instance: ModelInstance) -> ModelSizes:
        return ModelSizes.of(augmented.graph.model(instance.role))

    for index, node in enumerate(augmented.nodes):
        by_device: Mapping[Device, Mapping[str, int]] = {}
        match node.work:
            case Commit():  # it reads host memory alone
                continue
            case ModelCall(call, instance, _, part):
                work, speeds = CallWork.of(call.cut(part.of), workload), plan.cluster.node_speeds
                by_device = _active_bytes(work, plan[call.name], sizes_of(instance), speeds, backend)
            case Reallocate(source, target):
                by_device = _staged_by_move(source, target, sizes_of(source))
            case Export(instance):
                by_device = _equal_as_one({d: _staged_by_export(instance, held.get(d, ())) for d in node.devices})
            case Compute() | Transfer() | HostCopy() | Checkpoint():
                pass
            case _:
                assert_never(node.work)
        need_of: dict[int, Need] = {}  # by the terms; equal terms share a number
        for device in node.devices:
            terms = by_device.get(device, NOTHING)
            need = need_of.get(id(terms))
            if need is None:
                shares = (ByteShare(node.id, what, size, True) for what, size in terms.items() if size)
                need = need_of[id(terms)] = Need(index, node.id, tuple(shares))
            needs[device].append(need)
    return needs


@lru_cache(maxsize=256)  # the same in every step, and in many of the plans that a question compares
def _active_bytes(
    work: CallWork, placement: Placement, sizes: ModelSizes, speeds: tuple[float, ...], backend: Backend
) -> Mapping[Device, Mapping[str, int]]:
    """Active bytes of a model function call, by device: equal for equal stages of replicas with equally many rows."""
    execution, engine = Execution.of(placement), placement.engine
    in_instance = ("kv_cache",) if TRAITS[engine].paged_cache else ()  # it is allocated once, when the engine is built
    kept = (*STATIC_TERMS, *in_instance)
    works = replica_works(work, placement, speeds)

    @cache
    def active(share: CallWork, stage: int) -> Mapping[str, int]:
        terms = call_bytes(share, execution, sizes, engine, stage, on_cpu=backend == "cpu").by_term()
        return {what.replace("_", " "): size for what, size in terms.items() if what not in kept}

    of_replica = [[active(share, stage) for stage in range(placement.strategy.pp)] for share in works]
    return {device: of_replica[at.dp][at.pp] for device, at in device_coordinates(placement)}


@lru_cache(maxsize=256)  # the same in every step, and in most of the plans that a question compares
def _staged_by_move(
    source: ModelInstance, target: ModelInstance, sizes: ModelSizes
) -> Mapping[Device, Mapping[str, int]]:
    """At most a bucket of outgoing and a bucket of incoming bytes; bytes that stay are copied in place."""
    staged: dict[Device, int] = dict.fromkeys((*source.devices, *target.devices), 0)
    for ways in reallocation_loads(source, target, sizes):
        crossing: dict[Device, float] = defaultdict(float)
        for load in (load for span, load in ways.items() if span != "device"):
            for device, num_bytes in load.items():
                crossing[device] += num_bytes
        for device, num_bytes in crossing.items():
            staged[device] += min(BUCKET_BYTES, ceil(num_bytes))
    return _equal_as_one(staged)


def _staged_by_export(instance: ModelInstance, held: Sequence[ResidentBytes]) -> int:
    """At most a bucket of weights, which are gathered tensor by tensor."""
    weights = sum(kept.num_bytes for kept in held if kept.instance == instance and kept.what == "weights")
    return min(BUCKET_BYTES, weights)


def _equal_as_one(staged: Mapping[Device, int]) -> dict[Device, Mapping[str, int]]:
    terms = {num_bytes: {"staged weights": num_bytes} for num_bytes in staged.values()}
    return {device: terms[num_bytes] for device, num_bytes in staged.items()}
