"""Which device gets which coordinate: each copy of a role's weights overlaps most with what its devices already hold.

HybridFlow (section 5.3, figure 8) groups the ranks of generation at intervals so that each keeps the part of the
weights that it trains; that is a case of this assignment.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from math import gcd

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import linear_sum_assignment

from prefect_rlhf.placement.graph import DataflowGraph
from prefect_rlhf.placement.instances import instances, trained_instance
from prefect_rlhf.placement.layout import Region, layout_of
from prefect_rlhf.placement.mesh import Device, DeviceMesh
from prefect_rlhf.placement.model import ModelSpec
from prefect_rlhf.placement.plan import ExecutionPlan, ModelInstance
from prefect_rlhf.placement.reshard import intersection, num_elements
from prefect_rlhf.placement.strategy import Strategy

Shard = Mapping[str, Region]
"""What one device holds, by parameter."""


def aligned(plan: ExecutionPlan, graph: DataflowGraph) -> ExecutionPlan:
    """`plan` with an order for every call whose role is trained elsewhere and that states none.

    The trained instance itself, and roles that nobody trains, keep theirs: the plain order unless the plan states one.
    """
    orders: dict[str, tuple[int, ...]] = {}
    for instance, calls in instances(graph, plan).items():
        trained = trained_instance(graph, plan, instance.role)
        if trained is not None and trained != instance and not instance.order:
            order = overlapping_order(instance, trained, graph.model(instance.role))
            orders |= {call.name: order for call in calls}
    placements = ((name, replace(old, order=orders.get(name, old.order))) for name, old in plan.placements)
    return replace(plan, placements=tuple(placements))


@lru_cache(maxsize=256)  # presets and candidates of one question ask for the same pairs again and again
def overlapping_order(instance: ModelInstance, held: ModelInstance, model: ModelSpec) -> tuple[int, ...]:
    """The order of `instance` in which its devices have most elements of `held` already; () when it is the plain one.

    Of equal ones, the order that leaves most coordinates on their node, then on their device, as in the plain order. No
    tensor-parallel group spans more nodes than in the plain order: where the best order would, coordinates stay on
    their nodes and are assigned node by node.
    """
    devices = instance.mesh.devices()
    gains = _gains(instance, held, model)
    order = _assignment(gains, range(len(devices)))
    plain_nodes = _nodes_of_groups(devices, instance.strategy)
    nodes = _nodes_of_groups([devices[position] for position in order], instance.strategy)
    if any(found > plain for found, plain in zip(nodes, plain_nodes, strict=True)):
        order = [p for node in _positions_by_node(devices) for p in _assignment(gains, node)]
    return tuple(order) if order != list(range(len(devices))) else ()


def _gains(instance: ModelInstance, held: ModelInstance, model: ModelSpec) -> NDArray[np.float64]:
    """[device, coordinate]: how good it is that the device (by position in the mesh) gets the coordinate.

    Elements that overlap count first, the same node as in the plain order second, the same device last.
    """
    devices = instance.mesh.devices()
    have, want = _shards(held, model), _shards(replace(instance, order=()), model)
    known: dict[tuple[int, int], int] = {}  # overlap of two shards: replicas share theirs
    size = len(devices)
    wanted = [want[device] for device in devices]
    overlaps = [[_overlap(have.get(device), shard, known) for shard in wanted] for device in devices]
    unit = gcd(*(overlap for row in overlaps for overlap in row)) or 1  # keeps the sums exact in float64
    gains = np.array([[overlap // unit for overlap in row] for row in overlaps], dtype=np.float64) * (size + 1) ** 2
    gains += (size + 1) * np.array([[a.node == b.node for b in devices] for a in devices])
    return gains + np.eye(size)


def _shards(instance: ModelInstance, model: ModelSpec) -> dict[Device, Shard]:
    """What each device holds; the same object for replicas."""
    one = replace(instance.strategy, dp=1)
    mesh = DeviceMesh(0, 1, 0, one.num_devices)  # any will do for one replica
    layout = layout_of(replace(instance, mesh=mesh, strategy=one, order=()), model, mesh)
    shards = {(at.pp, at.tp): layout.of_rank(rank) for rank, at in enumerate(one.coordinates())}
    placed = zip(instance.devices, instance.strategy.coordinates(), strict=True)
    return {device: shards[at.pp, at.tp] for device, at in placed}


def _overlap(have: Shard | None, want: Shard, known: dict[tuple[int, int], int]) -> int:
    """Elements that both hold."""
    if have is None:
        return 0
    key = id(have), id(want)
    if key not in known:
        common = (intersection(have[name], region) for name, region in want.items() if name in have)
        known[key] = sum(num_elements(region) for region in common if region is not None)
    return known[key]


def _assignment(gains: NDArray[np.float64], positions: Sequence[int]) -> list[int]:
    """For each of the coordinates at `positions`, the device out of those at `positions`; the most gain in total."""
    block = gains[np.ix_(positions, positions)]
    _, chosen = linear_sum_assignment(block.T, maximize=True)
    return [positions[index] for index in chosen]


def _nodes_of_groups(devices: Sequence[Device], strategy: Strategy) -> list[int]:
    """How many nodes each tensor-parallel group spans; its members stand side by side."""
    groups = (devices[first : first + strategy.tp] for first in range(0, len(devices), strategy.tp))
    return [len({device.node for device in group}) for group in groups]


def _positions_by_node(devices: Sequence[Device]) -> list[list[int]]:
    """Positions of each node's devices; a mesh lists them node by node."""
    nodes = dict.fromkeys(device.node for device in devices)
    return [[p for p, device in enumerate(devices) if device.node == node] for node in nodes]
