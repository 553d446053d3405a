"""Where computations and evaluation calls go, given where the calls of an iteration with models do."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace

from prefect_rlhf.placement.errors import InvalidInput
from prefect_rlhf.placement.graph import Call, DataflowGraph
from prefect_rlhf.placement.mesh import Device, DeviceMesh
from prefect_rlhf.placement.plan import Placement
from prefect_rlhf.placement.plans.check import ENGINES, violations
from prefect_rlhf.placement.strategy import Strategy, strategies


def completed(
    graph: DataflowGraph, chosen: Mapping[str, Placement], lease: DeviceMesh, device: Device
) -> tuple[tuple[str, Placement], ...]:
    """A placement for every call: those `chosen`, computations on `device`, evaluation like its siblings.

    Raises InvalidInput for an evaluation call that can run nowhere.
    """
    placements = dict(chosen)
    for call in graph:
        if call.kind == "compute":
            placements[call.name] = Placement(DeviceMesh(device.node, 1, device.index, 1), Strategy(), "python")
        elif call.name not in placements:
            placements[call.name] = _like_siblings(call, graph, chosen, lease)
    return tuple((call.name, placements[call.name]) for call in graph)


def _like_siblings(call: Call, graph: DataflowGraph, chosen: Mapping[str, Placement], lease: DeviceMesh) -> Placement:
    """The copy of weights that a sibling uses, where the rows divide so; else a copy of its own on a sibling's mesh."""
    refused: list[InvalidInput] = []
    for placement in _to_try(call, graph, chosen, lease):
        found = list(violations(call, placement, graph))
        if not found:
            return placement
        refused += found[:1]
    raise refused[0]


def _to_try(
    call: Call, graph: DataflowGraph, chosen: Mapping[str, Placement], lease: DeviceMesh
) -> Iterator[Placement]:
    siblings = [other for other in graph if other.role == call.role and other.name in chosen]
    siblings.sort(key=lambda other: other.kind != call.kind)
    placements = [chosen[other.name] for other in siblings]
    for placement in placements:
        if placement.engine in ENGINES[call.kind]:
            yield from (replace(placement, micro_batches=cuts) for cuts in _halved(placement.micro_batches))
    for mesh in (*(placement.mesh for placement in placements), lease):
        for strategy in strategies(mesh.num_devices):
            yield Placement(mesh, strategy, ENGINES[call.kind][0])
    for mesh in dict.fromkeys(placement.mesh for placement in placements):
        first = DeviceMesh(mesh.first_node, 1, mesh.first_device, 1)
        yield Placement(first, Strategy(), ENGINES[call.kind][0])


def _halved(cuts: int) -> Iterator[int]:
    """As many as a sibling needs to fit in memory, or as few less as divide the rows."""
    while cuts > 1:
        yield cuts
        cuts //= 2
    yield 1
