"""Which rows must be moved before each call of an iteration, and which moves two calls can share."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass

from prefect_rlhf.placement.graph import DataflowGraph
from prefect_rlhf.placement.mesh import Device
from prefect_rlhf.placement.node import RowMove
from prefect_rlhf.placement.plan import ExecutionPlan
from prefect_rlhf.placement.rows import Rows, held_rows, needed_rows, row_moves


@dataclass(frozen=True, slots=True)
class Shared:
    """Keys that the transfer before an earlier call brings for this one as well."""

    consumer: str
    move: RowMove


@dataclass(frozen=True, slots=True)
class Feed:
    """What one call needs beside what its devices hold: moves of its own, and parts of earlier calls' transfers."""

    moves: tuple[RowMove, ...]
    shared: tuple[Shared, ...]

    def local(self, producer: str, keys: tuple[str, ...]) -> tuple[str, ...]:
        """Those of the producer's keys that no transfer brings."""
        brought = {
            key
            for move in (*self.moves, *(share.move for share in self.shared))
            if move.producer == producer
            for key in move.keys
        }
        return tuple(key for key in keys if key not in brought)


def feeds(graph: DataflowGraph, plan: ExecutionPlan) -> dict[str, Feed]:
    """The feed of every call that lacks rows on its devices; the same in every step."""
    found: dict[str, Feed] = {}
    for call in graph:
        keys: dict[tuple[str | None, str], list[str]] = defaultdict(list)  # (earlier consumer, producer) -> keys
        for move in row_moves(graph, plan, call.name):
            for key in move.keys:
                keys[_shareable(graph, plan, found, call.name, move.producer, key), move.producer].append(key)
        if keys:
            every = [(earlier, RowMove(producer, tuple(names))) for (earlier, producer), names in keys.items()]
            own = tuple(move for earlier, move in every if earlier is None)
            shared = tuple(Shared(earlier, move) for earlier, move in every if earlier is not None)
            found[call.name] = Feed(own, shared)
    return found


def _shareable(
    graph: DataflowGraph, plan: ExecutionPlan, found: Mapping[str, Feed], consumer: str, producer: str, key: str
) -> str | None:
    """An earlier call whose transfer brings all that `consumer` needs of this key, without making it wait longer."""
    waits_for = graph.reads_of(consumer).keys()
    for earlier, feed in found.items():
        brings = any(move.producer == producer and key in move.keys for move in feed.moves)
        no_longer = {move.producer for move in feed.moves} <= waits_for
        if brings and no_longer and _covered(graph, plan, consumer, producer, earlier):
            return earlier
    return None


def _covered(graph: DataflowGraph, plan: ExecutionPlan, consumer: str, producer: str, earlier: str) -> bool:
    held = held_rows(graph.call(producer), plan[producer])
    brought = needed_rows(graph.call(earlier), plan[earlier])
    return all(
        set(rows) <= _at(held, device) | _at(brought, device)
        for device, rows in needed_rows(graph.call(consumer), plan[consumer]).items()
    )


def _at(rows: Mapping[Device, Rows], device: Device) -> set[int]:
    return set(rows.get(device, ()))
