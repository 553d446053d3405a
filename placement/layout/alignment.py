"""Device orders that let each copy of a role's weights overlap as much as possible with weights already on its devices.

HybridFlow (section 5.3, figure 8) groups generation's ranks at intervals so that each keeps the part of the weights
that it trains, which is a case of this assignment.
"""

from collections.abc import Sequence
from dataclasses import replace
from functools import cache, lru_cache
from itertools import groupby

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import linear_sum_assignment

from prefect_rlhf.placement.devices.mesh import Device, DeviceMesh
from prefect_rlhf.placement.devices.strategy import Coordinate, Strategy
from prefect_rlhf.placement.graph import DataflowGraph
from prefect_rlhf.placement.layout.layout import Layout, held_parts, layout_of
from prefect_rlhf.placement.layout.regions import Region, intersection, num_elements
from prefect_rlhf.placement.models.model import ModelSpec
from prefect_rlhf.placement.plan import (
    EngineKind,
    ExecutionPlan,
    ModelInstance,
    device_coordinates,
    instances,
    trained_instance,
)


def aligned(plan: ExecutionPlan, graph: DataflowGraph) -> ExecutionPlan:
    """Return `plan` with a device order for every call of a role that is trained elsewhere, unless the plan states an
    order.

    The trained instance itself, and frozen roles, keep the plain order or the order that the plan states.
    """
    orders: dict[str, tuple[int, ...]] = {}
    for instance, calls in instances(graph, plan).items():
        trained = trained_instance(graph, plan, instance.role)
        if trained is not None and trained != instance and not instance.device_order:
            order = overlapping_order(instance, trained, graph.model(instance.role))
            orders |= {call.name: order for call in calls}
    reordered = (
        (name, replace(placement, device_order=orders.get(name, placement.device_order)))
        for name, placement in plan.placements
    )
    return replace(plan, placements=tuple(reordered))


@lru_cache(maxsize=256)  # presets and candidates of a question request the same pairs many times
def overlapping_order(instance: ModelInstance, trained: ModelInstance, model: ModelSpec) -> tuple[int, ...]:
    """Return the device order of `instance` that overlaps most with `trained`; () for the plain order.

    Among equally good orders, the order wins that leaves most coordinates on the node, then on the device, of the plain
    order. No tensor-parallel group spans more nodes than in the plain order: if the best order would do so, coordinates
    stay on their nodes and are assigned node by node. This much faster method is also used if no order of all devices
    overlaps more.
    """
    if not instance.mesh.overlaps(trained.mesh):
        return ()
    devices = instance.mesh.devices()
    shared, kinds = _shared_elements(instance, trained, model)
    most = shared[np.unique(kinds)].max(axis=0)  # that any device shares with each coordinate
    if (shared[kinds, range(len(devices))] == most).all():
        return ()  # no order overlaps more, and none leaves as many coordinates on their devices
    positions = [list(of_node) for _, of_node in groupby(range(len(devices)), lambda place: devices[place].node)]
    order = on_nodes = [position for of_node in positions for position in _assignment(shared, kinds, [of_node])]
    if shared[[kinds[position] for position in order], range(len(order))].sum() < min(
        most.sum(), shared.max(axis=1)[kinds].sum()
    ):
        order = _assignment(shared, kinds, positions)
        plain_spans = _nodes_of_groups(devices, instance.strategy)
        spans = _nodes_of_groups([devices[position] for position in order], instance.strategy)
        if any(span > plain for span, plain in zip(spans, plain_spans, strict=True)):
            order = on_nodes
    return tuple(order) if order != list(range(len(devices))) else ()


def _shared_elements(
    instance: ModelInstance, trained: ModelInstance, model: ModelSpec
) -> tuple[NDArray[np.float64], list[int]]:
    """Return [kind, coordinate]: the elements that a kind of device keeps with a coordinate, and each device's kind.

    Devices of a kind hold the same shard of the trained instance; those of the last kind hold none.
    """
    overlaps = _overlaps(trained, instance, model)
    unit = int(np.gcd.reduce(overlaps, axis=None)) or 1  # keeps the sums exact in float64
    shards = {device: (at.pp, _shard(at, trained.strategy)) for device, at in device_coordinates(trained)}
    numbers = {shard: number for number, shard in enumerate(dict.fromkeys(shards.values()))}
    coordinates = instance.strategy.coordinates()
    stages, parts = [at.pp for at in coordinates], [_shard(at, instance.strategy) for at in coordinates]
    shared = np.zeros((len(numbers) + 1, len(coordinates)))
    for (stage, part), number in numbers.items():
        shared[number] = overlaps[stage, part, stages, parts] // unit
    devices = instance.mesh.devices()
    return shared, [numbers[shards[device]] if device in shards else len(numbers) for device in devices]


def _shard(at: Coordinate, strategy: Strategy) -> int:
    """Return the part of its stage that a coordinate holds: the tp part, of each share of experts in order."""
    return at.dp % strategy.ep * strategy.tp + at.tp


def _overlaps(one: ModelInstance, other: ModelInstance, model: ModelSpec) -> NDArray[np.int64]:
    """Return [stage, part, stage, part]: elements that a shard of the first instance and a shard of the other share.

    The stage of a shard decides which parameters it has, its part (see `_shard`) how much of each.
    """
    sides = ((each.engine, replace(each.strategy, dp=each.strategy.ep)) for each in (one, other))
    return _overlaps_of(*sides, model, held_parts(model, other.engine))


@lru_cache(maxsize=256)  # the same for any number of replicas
def _overlaps_of(
    one: tuple[EngineKind, Strategy], other: tuple[EngineKind, Strategy], model: ModelSpec, moved: tuple[str, ...]
) -> NDArray[np.int64]:
    (a, b), (in_a, in_b) = (one[1], other[1]), (_stages(*one, model, moved), _stages(*other, model, moved))
    both = (in_a[:, None] & in_b[None, :]).reshape(a.pp * b.pp, -1)
    shared_out = (Strategy(each.ep, each.tp, ep=each.ep) for each in (a, b))
    held, wanted = (_split(of[0], parts, model, moved) for of, parts in zip((one, other), shared_out, strict=True))
    num_parts = a.ep * a.tp, b.ep * b.tp
    shared = _shared_parts(held, wanted, *num_parts)
    return (both @ shared).reshape(a.pp, b.pp, *num_parts).transpose(0, 2, 1, 3)


def _stages(engine: EngineKind, strategy: Strategy, model: ModelSpec, moved: tuple[str, ...]) -> NDArray[np.int64]:
    """Return [stage, parameter]: 1 if the stage has the parameter."""
    layout = _split(engine, Strategy(pp=strategy.pp), model, moved)
    on_stage = [[stage in layout.regions[name] for name in layout.shapes] for stage in range(strategy.pp)]
    return np.array(on_stage, dtype=np.int64)


def _shared_parts(one: Layout, other: Layout, parts: int, other_parts: int) -> NDArray[np.int64]:
    """Return [parameter, part * part]: elements of a parameter that parts of both layouts share."""

    @cache  # layers are alike
    def shared(regions: tuple[Region | None, ...], other_regions: tuple[Region | None, ...]) -> list[int]:
        common = (a and b and intersection(a, b) for a in regions for b in other_regions)
        return [num_elements(region) if region else 0 for region in common]

    def regions(layout: Layout, name: str, count: int) -> tuple[Region | None, ...]:
        return tuple(layout.regions[name].get(part) for part in range(count))

    by_parameter = [shared(regions(one, name, parts), regions(other, name, other_parts)) for name in one.shapes]
    return np.array(by_parameter, dtype=np.int64)


@lru_cache(maxsize=64)
def _split(engine: EngineKind, strategy: Strategy, model: ModelSpec, only: tuple[str, ...]) -> Layout:
    """Return the layout of parts of a model in an engine that is split so; rank r is the r-th stage or part."""
    mesh = DeviceMesh(0, 1, 0, strategy.num_devices)  # any will do
    return layout_of(ModelInstance(model.role, engine, mesh, strategy), model, mesh, only)


def _assignment(shared: NDArray[np.float64], kinds: Sequence[int], positions: Sequence[Sequence[int]]) -> list[int]:
    """Return, for each coordinate at the `positions` of some nodes, the device that it gets there for the most gain.

    Elements that overlap count first, the same node as in the plain order second, the same device last.
    """
    places = [position for of_node in positions for position in of_node]
    size = len(kinds)
    gains = np.ascontiguousarray(shared[np.ix_([kinds[place] for place in places], places)].T) * (size + 1) ** 2
    start = 0
    for of_node in positions:
        stop = start + len(of_node)
        gains[start:stop, start:stop] += size + 1
        start = stop
    np.einsum("ii->i", gains)[:] += 1
    _, chosen = linear_sum_assignment(gains, maximize=True)  # [coordinate, device], in rows: twice as fast
    return [places[index] for index in chosen]


def _nodes_of_groups(devices: Sequence[Device], strategy: Strategy) -> list[int]:
    """Count the nodes that each tensor-parallel group spans; its members stand side by side."""
    groups = (devices[first : first + strategy.tp] for first in range(0, len(devices), strategy.tp))
    return [len({device.node for device in group}) for group in groups]
