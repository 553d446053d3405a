"""The bytes that a node of an augmented graph needs on its devices only while it runs."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from math import ceil
from typing import assert_never

import numpy as np

from prefect_rlhf.placement.augmented.augmented_graph import AugmentedGraph
from prefect_rlhf.placement.augmented.work import (
    Checkpoint,
    Commit,
    Compute,
    Export,
    Follow,
    HostCopy,
    ModelCall,
    Reallocate,
    Transfer,
)
from prefect_rlhf.placement.cost.call_bytes import call_bytes
from prefect_rlhf.placement.cost.execution import Execution
from prefect_rlhf.placement.cost.moves import reallocation_loads
from prefect_rlhf.placement.cost.sizes import ModelSizes
from prefect_rlhf.placement.cost.uneven import works_of_rows
from prefect_rlhf.placement.cost.workload import CallWork, Workload
from prefect_rlhf.placement.devices.mesh import Backend, Device, DeviceMesh
from prefect_rlhf.placement.engine_traits import TRAITS
from prefect_rlhf.placement.memory.alike import Spread, spread_by_replica, spread_on
from prefect_rlhf.placement.memory.holdings import Kept
from prefect_rlhf.placement.models.engine_constants import BUCKET_BYTES, FOLLOWED_ELEMENTS, MAIN_WEIGHT_BYTES
from prefect_rlhf.placement.plan import ModelInstance, Placement
from prefect_rlhf.placement.rows.shares import placed_by_row_set

STATIC_TERMS = ("weights", "gradients", "optimizer")  # of a call's bytes: kept by its instance
Terms = Mapping[str, int]  # bytes of a device, by kind


@dataclass(frozen=True, slots=True)
class ByteShare:
    """`num_bytes` of a kind on a device; `owner` names the instance, or the node that needs them while it runs."""

    owner: str
    what: str
    num_bytes: int
    passing: bool


@dataclass(frozen=True, slots=True, eq=False)  # devices with the same needs share an object, so identity is equality
class Need:
    """The bytes that a node needs on a device while it runs; `position` is the node's position in the graph."""

    position: int
    node: str
    shares: tuple[ByteShare, ...]


@dataclass(frozen=True, slots=True, eq=False)
class NodeNeeds:
    """The needs of a node, by kind of device."""

    position: int
    node: str
    terms: Spread[Terms]

    def of_kind(self, kind: int) -> Need:
        """Return the need on a device of a kind."""
        shares = (ByteShare(self.node, what, size, True) for what, size in self.terms.values[kind].items() if size)
        return Need(self.position, self.node, tuple(shares))


def node_needs(
    augmented: AugmentedGraph, held: Mapping[ModelInstance, Spread[Kept]], workload: Workload, backend: Backend
) -> list[NodeNeeds]:
    """Count each node's needs on its devices; `held` are the bytes that instances keep there."""
    plan, needs = augmented.plan, list[NodeNeeds]()
    per_node = plan.cluster.devices_per_node

    def sizes_of(instance: ModelInstance) -> ModelSizes:
        return ModelSizes.of(augmented.graph.model(instance.role))

    for index, node in enumerate(augmented.nodes):
        match node.work:
            case Commit():  # it reads host memory alone
                continue
            case ModelCall(call, instance, _, part):
                work = CallWork.of(call.cut(part.of), workload)
                placed = placed_by_row_set(augmented.graph, plan, call.name)
                dealt = tuple(each.rows_at_once(part) for each in placed)
                terms = _active_bytes(work, plan[call.name], sizes_of(instance), dealt, backend, per_node)
            case Reallocate(source, target):
                terms = _staged_by_move(source, target, sizes_of(source), per_node)
            case Follow(source, target):
                terms = _staged_by_follow(source, target, sizes_of(source), sizes_of(target), per_node)
            case Export(instance):
                terms = _staged_by_export(held[instance])
            case Compute() | Transfer() | HostCopy() | Checkpoint():
                terms = _nothing(node.meshes, per_node)
            case _:
                assert_never(node.work)
        needs.append(NodeNeeds(index, node.id, terms))
    return needs


@lru_cache(maxsize=256)  # the same in every step, and in many of the plans that a question compares
def _active_bytes(
    work: CallWork,
    placement: Placement,
    sizes: ModelSizes,
    dealt: tuple[tuple[int, ...], ...],
    backend: Backend,
    per_node: int,
) -> Spread[Terms]:
    """Active bytes of a model function call: equal for equal stages of replicas with equally many rows.

    `dealt` says, for each row set, how many rows of a mini-batch each replica has.
    """
    execution, engine = Execution.of(placement), placement.engine
    in_instance = ("kv_cache",) if TRAITS[engine].paged_cache else ()  # it is allocated once, when the engine is built
    kept = (*STATIC_TERMS, *in_instance)

    def active(share: CallWork, stage: int) -> Terms:
        terms = call_bytes(share, execution, sizes, engine, stage, on_cpu=backend == "cpu").by_term()
        return {what.replace("_", " "): size for what, size in terms.items() if what not in kept}

    return spread_by_replica(placement, per_node, works_of_rows(work, dealt, placement.strategy.ep), active)


@lru_cache(maxsize=256)  # the same in every step, and in most of the plans that a question compares
def _staged_by_move(source: ModelInstance, target: ModelInstance, sizes: ModelSizes, per_node: int) -> Spread[Terms]:
    """At most a bucket of outgoing and a bucket of incoming bytes; bytes that stay are copied in place."""
    staged: dict[Device, int] = dict.fromkeys((*source.devices, *target.devices), 0)
    for ways in reallocation_loads(source, target, sizes):
        crossing: dict[Device, float] = defaultdict(float)
        for load in (load for span, load in ways.items() if span != "device"):
            for device, num_bytes in load.items():
                crossing[device] += num_bytes
        for device, num_bytes in crossing.items():
            staged[device] += min(BUCKET_BYTES, ceil(num_bytes))
    kinds = {num_bytes: kind for kind, num_bytes in enumerate(dict.fromkeys(staged.values()))}
    numbers = np.array([device.node * per_node + device.index for device in staged], dtype=np.int64)
    of_device = np.array([kinds[num_bytes] for num_bytes in staged.values()], dtype=np.int64)
    return Spread(numbers, of_device, tuple({"staged weights": num_bytes} for num_bytes in kinds))


@lru_cache(maxsize=256)
def _staged_by_follow(
    source: ModelInstance, target: ModelInstance, sizes: ModelSizes, own: ModelSizes, per_node: int
) -> Spread[Terms]:
    """Besides a move's bytes, the follower's part of some weights as they arrive, and of a single set in float32."""
    staged = _staged_by_move(source, target, sizes, per_node)
    follows, takers = own.follows, np.array([device.node * per_node + device.index for device in target.devices])
    assert follows is not None  # only a follower follows
    if follows.share == 1 and own.dtype == sizes.dtype:  # the new weights are the leader's
        return staged
    largest = own.largest_moved(target.strategy.tp)
    arriving = min(own.most_trained(target.strategy), max(FOLLOWED_ELEMENTS, largest))
    averaged = arriving * sizes.item + largest * MAIN_WEIGHT_BYTES
    count, takes = len(staged.values), np.isin(staged.numbers, takers)
    taking = tuple({**terms, "staged averages": averaged} for terms in staged.values)
    return Spread(staged.numbers, staged.kinds + count * takes, (*staged.values, *taking))


def _staged_by_export(held: Spread[Kept]) -> Spread[Terms]:
    """Bytes that an export stages: at most a bucket of weights, since it gathers tensor by tensor."""
    weights = [sum(size for what, size in kept if what == "weights") for kept in held.values]
    return Spread(held.numbers, held.kinds, tuple({"staged weights": min(BUCKET_BYTES, size)} for size in weights))


@lru_cache(maxsize=1024)
def _nothing(meshes: tuple[DeviceMesh, ...], per_node: int) -> Spread[Terms]:
    return spread_on(meshes, per_node, {})
