"""Rows that must move between devices before a node runs, and the holder that sends each."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, lru_cache, partial
from typing import NamedTuple

from prefect_rlhf.placement.devices.mesh import Device
from prefect_rlhf.placement.graph import DataflowGraph
from prefect_rlhf.placement.plan import ExecutionPlan
from prefect_rlhf.placement.rows.partition import WHOLE, Part, RowIndices
from prefect_rlhf.placement.rows.shares import (
    PlacedCall,
    RowShare,
    ToldByCall,
    placed_by_row_set,
    placed_call,
    reading,
    reads_on_row_set,
)

_made = tuple.__new__  # without the arguments' names, which take half the time


@dataclass(frozen=True, slots=True)
class RowMove:
    """Keys that a transfer brings from the ranks that made them to the ranks that need them.

    The placement of `producer` decides which ranks hold which rows. A dataset's rows never move, because every rank
    reads them from the dataset.
    """

    producer: str
    keys: tuple[str, ...]


class DeviceTransfer(NamedTuple):
    """The rows, and which of their keys, that move from device `source` to device `target`. A tuple, for speed."""

    source: Device
    target: Device
    producer: str
    keys: tuple[str, ...]
    rows: RowIndices


def row_moves(graph: DataflowGraph, plan: ExecutionPlan, consumer: str) -> tuple[RowMove, ...]:
    """Return, for each producer, the keys with rows that some device of the consumer may lack.

    Where rows that are partitioned by tokens, or selected, really are is known only after their calls have reported.
    """
    lacking: dict[str, tuple[str, ...]] = {}
    for placed in placed_by_row_set(graph, plan, consumer):
        for producer, keys in reads_on_row_set(graph, placed).items():
            found = _lacking(placed, placed_call(graph, plan, producer), keys)
            if found:
                lacking[producer] = tuple(dict.fromkeys((*lacking.get(producer, ()), *found)))
    return tuple(RowMove(producer, keys) for producer, keys in lacking.items())


@lru_cache(maxsize=1024)  # many of the plans that a question compares have the same
def _lacking(consumer: PlacedCall, producer: PlacedCall, keys: tuple[str, ...]) -> tuple[str, ...]:
    """Return the keys of a producer whose rows some device of the consumer may lack."""
    held, needed, read = producer.rows_held(), consumer.needs().items(), reading(consumer.call.rows, producer.call.rows)
    distinct = {(need, held.get(device)) for device, need in needed}  # many devices need and hold the same
    apart = [need for need, share in distinct if not read(need.share).surely_within([] if share is None else [share])]
    return tuple(key for key in keys if any(key in need.keys for need in apart))


def row_transfers(
    graph: DataflowGraph,
    plan: ExecutionPlan,
    consumer: str,
    moves: Sequence[RowMove] | None = None,
    told: ToldByCall | None = None,
    part: Part = WHOLE,
) -> tuple[DeviceTransfer, ...]:
    """Return the rows of `moves` that must move between each pair of devices; by default all missing rows.

    With `part`, return the moves for that part of the consumer's rows. A device never receives a row that it holds.
    Sources are the nearest holders (same node, then other nodes), the least loaded first. For `told` see RowShare.rows.
    """
    moves = row_moves(graph, plan, consumer) if moves is None else moves
    placed = placed_moves(graph, plan, consumer, moves)
    return transfers_of_equal_rows(placed, part) if told is None else _transfers(placed, told, part)


@dataclass(frozen=True, slots=True)
class PlacedMoves:
    """Everything that decides the transfers before a call: the call on each row set, and moves with their producers."""

    consumers: tuple[PlacedCall, ...]
    producers: tuple[tuple[RowMove, PlacedCall], ...]


def placed_moves(graph: DataflowGraph, plan: ExecutionPlan, consumer: str, moves: Iterable[RowMove]) -> PlacedMoves:
    """Return the moves to a call, as a plan places them."""
    producers = tuple((move, placed_call(graph, plan, move.producer)) for move in moves)
    return PlacedMoves(placed_by_row_set(graph, plan, consumer), producers)


@lru_cache(maxsize=256)
def transfers_of_equal_rows(placed: PlacedMoves, part: Part) -> tuple[DeviceTransfer, ...]:
    """Return the transfers of a part as if all rows were equally long."""
    return _transfers(placed, None, part)


def _transfers(placed: PlacedMoves, told: ToldByCall | None, streamed: Part) -> tuple[DeviceTransfer, ...]:
    """Send each row set of a call the rows that it lacks, except rows that an earlier call's transfer sends anyway."""
    consumers, producers = placed.consumers, placed.producers
    load: dict[Device, int] = defaultdict(int)
    transfers: list[DeviceTransfer] = []
    for move, producer in producers:
        by_holders = cache(partial(_by_holders, _holders(producer.rows_held(), told)))
        brought: dict[tuple[Device, str], set[int]] = defaultdict(set)
        for consumer in (c for c in consumers if any(port.source == move.producer for port in c.call.inputs)):
            read = reading(consumer.call.rows, producer.call.rows)
            for need, targets in consumer.devices_by_need().items():
                keys = tuple(key for key in move.keys if key in need.keys)
                needed = read(need.share).rows(told, streamed) if keys else ()
                held = by_holders(needed)
                for target in targets:
                    if len(consumers) > 1:
                        new = tuple(row for row in needed if any(row not in brought[target, key] for key in keys))
                        held = by_holders(new)
                        for key in keys:
                            brought[target, key].update(new)
                    for source, rows in _from_nearest(target, held, load, len(keys), len(targets)):
                        transfers.append(_made(DeviceTransfer, (source, target, move.producer, keys, rows)))
    return tuple(transfers)


def _holders(held: Mapping[Device, RowShare], told: ToldByCall | None) -> dict[int, _Holders]:
    """Map each row to its holders. Rows of the same share have one object, so that they can be grouped by it."""
    by_share: dict[RowShare, list[Device]] = defaultdict(list)
    for device in sorted(held):
        by_share[held[device]].append(device)
    holders: dict[int, list[Device]] = {}
    for share, devices in by_share.items():
        for row in share.rows(told):
            holders[row] = sorted((*holders[row], *devices)) if row in holders else devices
    lists = {id(devices): devices for devices in holders.values()}
    of_list = {key: _Holders.of(devices) for key, devices in lists.items()}
    return {row: of_list[id(devices)] for row, devices in holders.items()}


@dataclass(frozen=True, slots=True)
class _Holders:
    """The devices that hold the same rows, in ascending order; all, as a set, and those on each node."""

    devices: Sequence[Device]
    every: frozenset[Device]
    by_node: Mapping[int, Sequence[Device]]

    @classmethod
    def of(cls, devices: Sequence[Device]) -> _Holders:
        by_node: dict[int, list[Device]] = defaultdict(list)
        for device in devices:
            by_node[device.node].append(device)
        return cls(devices, frozenset(devices), dict(by_node))


def _by_holders(holders: Mapping[int, _Holders], rows: RowIndices) -> tuple[tuple[_Holders, RowIndices], ...]:
    """Return the rows that the same devices hold together, in ascending order, each with those devices."""
    together: dict[int, list[int]] = defaultdict(list)  # by the identity of the holders
    for row in sorted(rows):
        together[id(holders[row])].append(row)
    return tuple((holders[same[0]], tuple(same)) for same in together.values())


def _from_nearest(
    target: Device,
    by_holders: Iterable[tuple[_Holders, RowIndices]],
    load: dict[Device, int],
    weight: int,
    num_targets: int,
) -> Iterator[tuple[Device, RowIndices]]:
    """Choose sources for the rows that the target lacks; `load` counts the rows that each source sends and is updated.

    `num_targets` devices need the same rows. They divide the nearest holders, so that each target has few sources.
    """
    for holders, rows in by_holders:
        if target in holders.every:
            continue
        nearest = holders.by_node.get(target.node, holders.devices)
        size = -(-len(rows) // max(1, len(nearest) // num_targets))
        for start in range(0, len(rows), size):
            source, part = min(nearest, key=load.__getitem__), rows[start : start + size]
            load[source] += weight * len(part)
            yield source, part
