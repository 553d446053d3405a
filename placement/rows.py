"""Which rows of a step's batch each device holds and needs, and which rows must go from device to device.

Rows are numbered 0..num_rows-1 within a step, whatever the plan.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from prefect_rlhf.placement.errors import InvalidInput
from prefect_rlhf.placement.graph import Call, DataflowGraph
from prefect_rlhf.placement.mesh import Device
from prefect_rlhf.placement.node import RowMove
from prefect_rlhf.placement.plan import ExecutionPlan, Placement

Rows = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class DeviceTransfer:
    """Rows of one call's keys that go from device `source` to device `target` (never equal)."""

    source: Device
    target: Device
    producer: str
    keys: tuple[str, ...]
    rows: Rows


def split_rows(num_rows: int, dp: int, mini_batches: int = 1, field: str = "num_rows") -> tuple[Rows, ...]:
    """The rows of each data-parallel replica: the d-th equal part of each mini-batch.

    Mini-batch m is rows [m*B/M, (m+1)*B/M) of the whole batch, so its rows do not depend on the plan.

    >>> split_rows(8, dp=2)
    ((0, 1, 2, 3), (4, 5, 6, 7))
    >>> split_rows(8, dp=2, mini_batches=2)
    ((0, 1, 4, 5), (2, 3, 6, 7))
    """
    parts = dp * mini_batches
    if num_rows < 1 or num_rows % parts:
        raise InvalidInput(field, num_rows, f"a multiple of {parts} (dp {dp} times {mini_batches} mini-batches)")
    part = num_rows // parts
    return tuple(
        tuple(row for m in range(mini_batches) for row in range((m * dp + d) * part, (m * dp + d + 1) * part))
        for d in range(dp)
    )


def needed_rows(call: Call, placement: Placement) -> dict[Device, Rows]:
    """The rows that each device works on: its replica's; all of them on a computation's one device."""
    devices = placement.devices
    if call.kind == "compute":
        return {devices[0]: tuple(range(call.num_rows))}
    mini_batches = call.mini_batches if call.kind == "train_step" else 1
    split = split_rows(call.num_rows, placement.strategy.dp, mini_batches, f"calls.{call.name}.num_rows")
    coordinates = placement.strategy.coordinates()
    return {device: split[at.dp] for device, at in zip(devices, coordinates, strict=True)}


def held_rows(call: Call, placement: Placement) -> dict[Device, Rows]:
    """The rows of the call's outputs that each device holds once it has run.

    generate: every device of the replica. inference: the replica's device of the last pipeline stage with tp
    coordinate 0. compute: its one device. train_step: none.
    """
    if call.kind == "train_step":
        return {}
    needed = needed_rows(call, placement)
    if call.kind != "inference":
        return needed
    strategy = placement.strategy
    return {
        device: rows
        for (device, rows), at in zip(needed.items(), strategy.coordinates(), strict=True)
        if at.pp == strategy.pp - 1 and at.tp == 0
    }


def row_moves(graph: DataflowGraph, plan: ExecutionPlan, consumer: str) -> tuple[RowMove, ...]:
    """What must be brought to the consumer: for each producer the keys of which some device lacks some row."""
    call, placements = graph.call(consumer), plan.by_call
    needed = needed_rows(call, placements[consumer])
    return tuple(
        RowMove(producer, keys)
        for producer, keys in graph.reads_of(consumer).items()
        if not _covers(held_rows(graph.call(producer), placements[producer]), needed)
    )


def row_transfers(
    graph: DataflowGraph, plan: ExecutionPlan, consumer: str, moves: Sequence[RowMove] | None = None
) -> tuple[DeviceTransfer, ...]:
    """Per pair of devices, the rows of `moves` (by default all that the consumer lacks) that must go between them.

    A device receives no row that it holds. Sources are the nearest holders (same node, then other nodes), the least
    loaded first.
    """
    placements = plan.by_call
    needed = needed_rows(graph.call(consumer), placements[consumer])
    load: dict[Device, int] = defaultdict(int)
    found: list[DeviceTransfer] = []
    for move in row_moves(graph, plan, consumer) if moves is None else moves:
        held = held_rows(graph.call(move.producer), placements[move.producer])
        for (source, target), rows in _pairs(held, needed, load, len(move.keys)).items():
            found.append(DeviceTransfer(source, target, move.producer, move.keys, tuple(rows)))
    return tuple(found)


def _covers(held: Mapping[Device, Rows], needed: Mapping[Device, Rows]) -> bool:
    return all(set(rows) <= set(held.get(device, ())) for device, rows in needed.items())


def _pairs(
    held: Mapping[Device, Rows], needed: Mapping[Device, Rows], load: dict[Device, int], weight: int
) -> dict[tuple[Device, Device], list[int]]:
    """Choose a source for every missing row; `load` counts what each source sends and is updated."""
    holders: dict[int, list[Device]] = defaultdict(list)
    for device, rows in held.items():
        for row in rows:
            holders[row].append(device)
    pairs: dict[tuple[Device, Device], list[int]] = defaultdict(list)
    for target, rows in needed.items():
        for row in sorted(set(rows) - set(held.get(target, ()))):
            source = nearest(target, holders[row], load)
            load[source] += weight
            pairs[source, target].append(row)
    return pairs


def nearest(target: Device, sources: Iterable[Device], load: Mapping[Device, int]) -> Device:
    """The source on the target's node that sends least so far; without one, the least loaded of all."""
    return min(sources, key=lambda source: (source.node != target.node, load.get(source, 0), source))
