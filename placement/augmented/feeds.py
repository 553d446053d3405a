"""Which rows must move before each call of an iteration, and which moves two calls can share."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache

from prefect_rlhf.placement.augmented.priority import CallPriorities
from prefect_rlhf.placement.devices.blocks import covers
from prefect_rlhf.placement.devices.mesh import Device
from prefect_rlhf.placement.graph import DataflowGraph
from prefect_rlhf.placement.plan import ExecutionPlan
from prefect_rlhf.placement.row_set import RowSet
from prefect_rlhf.placement.rows.moves import RowMove, row_moves
from prefect_rlhf.placement.rows.shares import PlacedCall, RowShare, placed_by_row_set, placed_call, reading, reads


@dataclass(frozen=True, slots=True)
class SharedMove:
    """Keys that a call gets from the transfer before an earlier call, `consumer`."""

    consumer: str
    move: RowMove


@dataclass(frozen=True, slots=True)
class Feed:
    """The rows that a call needs and that its devices lack: its own transfers, and parts of earlier calls' transfers.

    `transfers` are the moves of each transfer; the last transfer has all moves that need not go ahead. `local` are the
    keys, by producer, that are used on the devices that made them, without a transfer.
    """

    transfers: tuple[tuple[RowMove, ...], ...]
    shared: tuple[SharedMove, ...]
    local: Mapping[str, tuple[str, ...]]

    def goes_ahead(self, producer: str) -> bool:
        """Whether rows of `producer` move in their own transfer, before the last transfer."""
        return any(move.producer == producer for moves in self.transfers[:-1] for move in moves)


def feeds(graph: DataflowGraph, plan: ExecutionPlan, priorities: CallPriorities) -> dict[str, Feed]:
    """Return the feed of every call that may lack rows on its devices. It is the same in every step."""
    by_call: dict[str, Feed] = {}
    for call in graph:
        keys: dict[tuple[str | None, str], list[str]] = defaultdict(list)  # (earlier consumer, producer) -> keys
        moved = {move.producer: move.keys for move in row_moves(graph, plan, call.name)}
        for producer, moved_keys in moved.items():
            for key in moved_keys:
                keys[_sharing_call(graph, plan, by_call, call.name, producer, key), producer].append(key)
        if keys:
            moves = [(earlier, RowMove(producer, tuple(names))) for (earlier, producer), names in keys.items()]
            own = [move for earlier, move in moves if earlier is None]
            shared = tuple(SharedMove(earlier, move) for earlier, move in moves if earlier is not None)
            local = {
                producer: tuple(key for key in names if key not in moved.get(producer, ()))
                for producer, names in reads(graph, plan, call.name).items()
            }
            by_call[call.name] = Feed(_transfers(plan, call.name, own, priorities.levels), shared, local)
    return by_call


def _transfers(
    plan: ExecutionPlan, consumer: str, moves: Sequence[RowMove], levels: Mapping[str, int]
) -> tuple[tuple[RowMove, ...], ...]:
    """Group the moves of a call by transfer.

    A producer's rows go ahead in their own transfer if that frees devices: devices that neither the consumer nor any
    later producer occupies. Otherwise the single transfer would need these devices when the later rows exist, although
    they may have begun the next step by then.
    """
    ahead = []
    for move in moves:
        later = [other.producer for other in moves if levels[other.producer] > levels[move.producer]]
        meshes = [plan[name].mesh for name in (*later, consumer)]
        if later and not covers(meshes, plan[move.producer].mesh):
            ahead.append(move)
    rest = tuple(move for move in moves if move not in ahead)
    return (*((move,) for move in ahead), rest) if rest else ()  # the latest producer's rows are never ahead


def _sharing_call(
    graph: DataflowGraph, plan: ExecutionPlan, by_call: Mapping[str, Feed], consumer: str, producer: str, key: str
) -> str | None:
    """Return an earlier call whose transfers bring all that `consumer` needs of this key, without a longer wait."""
    waits_for = graph.reads_of(consumer).keys()
    for earlier, feed in by_call.items():
        if plan.parts(earlier) % plan.parts(consumer):
            continue  # a part of the consumer would wait for more rows than its own
        moves = [move for transfer in feed.transfers for move in transfer]
        brings = any(move.producer == producer and key in move.keys for move in moves)
        no_longer = {move.producer for move in moves} <= waits_for
        if brings and no_longer and _covers(graph, plan, consumer, producer, earlier, key):
            return earlier
    return None


def _covers(graph: DataflowGraph, plan: ExecutionPlan, consumer: str, producer: str, earlier: str, key: str) -> bool:
    """Whether the rows made on a device and those brought there for the earlier call are all that the consumer needs.

    Only of that key; on each of the consumer's devices.
    """
    consumers, earliers = (
        tuple(
            part for part in placed_by_row_set(graph, plan, name) if key in graph.keys_read(part.call).get(producer, ())
        )
        for name in (consumer, earlier)
    )
    return _all_covered(consumers, earliers, placed_call(graph, plan, producer), key)


@lru_cache(maxsize=1024)  # many of the plans that a question compares have the same
def _all_covered(
    consumers: tuple[PlacedCall, ...], earliers: tuple[PlacedCall, ...], producer: PlacedCall, key: str
) -> bool:
    held, rows = producer.rows_held(), producer.call.rows
    brought = _needed_of(earliers, rows, key)
    distinct = {
        (shares, held.get(device), brought.get(device, ()))  # many devices need and hold the same
        for device, shares in _needed_of(consumers, rows, key).items()
    }
    return all(
        needed.surely_within([*([] if share is None else [share]), *there])
        for shares, share, there in distinct
        for needed in shares
    )


@lru_cache(maxsize=64)  # the checks of a plan ask for the same parts several times
def _needed_of(parts: tuple[PlacedCall, ...], source: RowSet, key: str) -> Mapping[Device, tuple[RowShare, ...]]:
    """Return the rows of `source` that each device of the call's parts needs for a key: a share for each row set."""
    needed: dict[Device, tuple[RowShare, ...]] = {}
    for placed in parts:
        read = reading(placed.call.rows, source)
        for need, devices in placed.devices_by_need().items():
            if key in need.keys:
                alone = (read(need.share),)
                needed |= {device: needed[device] + alone if device in needed else alone for device in devices}
    return needed
