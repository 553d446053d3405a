"""Places computations and evaluation calls once the model calls are placed."""

from collections.abc import Iterator, Mapping
from dataclasses import replace

from prefect_rlhf.errors.errors import InvalidInput
from prefect_rlhf.placement.devices.mesh import Backend, Device, DeviceMesh
from prefect_rlhf.placement.devices.strategy import Strategy, strategies
from prefect_rlhf.placement.engine_traits import engines_of
from prefect_rlhf.placement.graph import Call, DataflowGraph
from prefect_rlhf.placement.plan import Placement
from prefect_rlhf.placement.plans.check import able_engines, violations
from prefect_rlhf.placement.words.table import WORDS, without


def completed(
    graph: DataflowGraph, chosen: Mapping[str, Placement], lease: DeviceMesh, device: Device, backend: Backend
) -> tuple[tuple[str, Placement], ...]:
    """Return a placement for every call: those `chosen`, computations on `device`, evaluation calls like their
    siblings.

    Raises InvalidInput for an evaluation call that cannot run on any mesh.
    """
    placements = dict(chosen)
    for call in graph:
        if call.kind == "compute":
            placements[call.name] = Placement(DeviceMesh(device.node, 1, device.index, 1), Strategy(), "python")
        elif call.name not in placements:
            refused: list[InvalidInput] = []
            for placement in _proposals(call, graph, chosen, lease, backend):
                error = next(violations(call, placement, graph, backend), None)
                if error is None:
                    placements[call.name] = placement
                    break
                refused.append(error)
            else:
                raise refused[0]
    return tuple((call.name, placements[call.name]) for call in graph)


def _proposals(
    call: Call, graph: DataflowGraph, chosen: Mapping[str, Placement], lease: DeviceMesh, backend: Backend
) -> Iterator[Placement]:
    """Yield the copy of weights that a sibling uses, else copies of its own on a sibling's mesh, on all, on a device.

    A sibling's copy comes in as many micro-batches as the sibling needs to fit in memory, then in fewer, since each has
    rows.
    """
    engine = able_engines(call, graph, backend)[0]
    siblings = [other for other in graph if other.role == call.role and other.name in chosen]
    siblings.sort(key=lambda other: other.kind != call.kind)
    placements = [chosen[other.name] for other in siblings]
    for placement in placements:
        if placement.engine in engines_of(call.kind):
            cuts = placement.micro_batches
            # An evaluation has no backward pass, and readers of its own.
            placement = without(placement, (word for word in WORDS.values() if not word.of_evaluation))
            while cuts > 1:
                yield replace(placement, micro_batches=cuts)
                cuts //= 2
            yield replace(placement, micro_batches=1)
    for mesh in (*(placement.mesh for placement in placements), lease):
        for strategy in strategies(mesh.num_devices):
            yield Placement(mesh, strategy, engine)
    for mesh in dict.fromkeys(placement.mesh for placement in placements):
        first = DeviceMesh(mesh.first_node, 1, mesh.first_device, 1)
        yield Placement(first, Strategy(), engine)
