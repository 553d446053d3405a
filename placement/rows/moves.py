"""Which rows must go from device to device before a node runs, and from which holder."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache

from prefect_rlhf.placement.graph import DataflowGraph
from prefect_rlhf.placement.mesh import Device
from prefect_rlhf.placement.plan import ExecutionPlan
from prefect_rlhf.placement.rows.partition import RowIndices
from prefect_rlhf.placement.rows.shares import (
    LengthsByCall,
    RowShare,
    _holds,
    _needs,
    _Placed,
    _placed,
    holds,
    needs,
    reads,
)


@dataclass(frozen=True, slots=True)
class DeviceTransfer:
    """Rows of one call's keys that go from device `source` to device `target` (never equal)."""

    source: Device
    target: Device
    producer: str
    keys: tuple[str, ...]
    rows: RowIndices


def row_moves(graph: DataflowGraph, plan: ExecutionPlan, consumer: str) -> tuple[RowMove, ...]:
    """What may have to be brought to the consumer: for each producer the keys of which some device may lack some row.

    Whether rows that are dealt by tokens do lie elsewhere is known only when their lengths are.
    """
    return tuple(
        RowMove(producer, lacking)
        for producer, keys in reads(graph, plan, consumer).items()
        if (lacking := tuple(_lacking(graph, plan, consumer, producer, keys)))
    )


def row_transfers(
    graph: DataflowGraph,
    plan: ExecutionPlan,
    consumer: str,
    moves: Sequence[RowMove] | None = None,
    lengths: LengthsByCall | None = None,
) -> tuple[DeviceTransfer, ...]:
    """Per pair of devices, the rows of `moves` (by default all that the consumer lacks) that must go between them.

    A device receives no row that it holds. Sources are the nearest holders (same node, then other nodes), the least
    loaded first. `lengths`: see Share.rows.
    """
    made = row_moves(graph, plan, consumer) if moves is None else moves
    makers = tuple((move, _placed(graph, plan, move.producer)) for move in made)
    if lengths is None:
        return _transfers_of_equal_rows(_placed(graph, plan, consumer), makers)
    return _transfers(_placed(graph, plan, consumer), makers, lengths)


@lru_cache(maxsize=256)
def _transfers_of_equal_rows(
    consumer: _Placed, makers: tuple[tuple[RowMove, _Placed], ...]
) -> tuple[DeviceTransfer, ...]:
    return _transfers(consumer, makers, None)


def _transfers(
    consumer: _Placed, makers: Sequence[tuple[RowMove, _Placed]], lengths: LengthsByCall | None
) -> tuple[DeviceTransfer, ...]:
    load: dict[Device, int] = defaultdict(int)
    found: list[DeviceTransfer] = []
    for move, maker in makers:
        holders = _holders(_holds(maker), lengths)
        for target, need in _needs(consumer).items():
            keys = tuple(key for key in move.keys if key in need.keys)
            wanted = need.share.rows(lengths) if keys else ()
            for source, rows in _from_nearest(target, wanted, holders, load, len(keys)).items():
                found.append(DeviceTransfer(source, target, move.producer, keys, tuple(rows)))
    return tuple(found)


def nearest(target: Device, sources: Sequence[Device]) -> Sequence[Device]:
    """The sources on the target's node; without one, all of them."""
    return [source for source in sources if source.node == target.node] or sources


def _lacking(
    graph: DataflowGraph, plan: ExecutionPlan, consumer: str, producer: str, keys: Sequence[str]
) -> Iterator[str]:
    held, needed = holds(graph, plan, producer), needs(graph, plan, consumer).items()
    here = {(need, held.get(device)) for device, need in needed}  # many devices need and hold the same
    apart = [need for need, share in here if not need.share.surely_within([] if share is None else [share])]
    return (key for key in keys if any(key in need.keys for need in apart))


def _holders(held: Mapping[Device, RowShare], lengths: LengthsByCall | None) -> dict[int, list[Device]]:
    """By row, in ascending order; rows that the same devices hold have the same list."""
    of_share: dict[RowShare, list[Device]] = defaultdict(list)
    for device in sorted(held):
        of_share[held[device]].append(device)
    found: dict[int, list[Device]] = {}
    for share, devices in of_share.items():
        for row in share.rows(lengths):
            found[row] = sorted((*found[row], *devices)) if row in found else devices
    return found


def _from_nearest(
    target: Device, wanted: RowIndices, holders: Mapping[int, Sequence[Device]], load: dict[Device, int], weight: int
) -> dict[Device, list[int]]:
    """Choose a source for every row that the target lacks; `load` counts what each source sends and is updated."""
    chosen: dict[Device, list[int]] = defaultdict(list)
    near: dict[int, Sequence[Device]] = {}  # by which list of holders
    for row in sorted(wanted):
        every = holders[row]
        if id(every) not in near:
            near[id(every)] = [] if target in every else nearest(target, every)
        if near[id(every)]:
            source = min(near[id(every)], key=load.__getitem__)
            load[source] += weight
            chosen[source].append(row)
    return chosen


@dataclass(frozen=True, slots=True)
class RowMove:
    """Keys that a transfer brings from the ranks that made them to the ranks that need them.

    `producer` is the call whose placement says who holds which rows. A dataset's rows never move: every rank reads
    them for itself.
    """

    producer: str
    keys: tuple[str, ...]
