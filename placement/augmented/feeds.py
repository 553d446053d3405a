"""Which rows must be moved before each call of an iteration, and which moves two calls can share."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from prefect_rlhf.placement.augmented.priority import CallPriorities
from prefect_rlhf.placement.graph import DataflowGraph
from prefect_rlhf.placement.plan import ExecutionPlan
from prefect_rlhf.placement.rows.moves import RowMove, row_moves
from prefect_rlhf.placement.rows.shares import holds, needs, reads


@dataclass(frozen=True, slots=True)
class Shared:
    """Keys that the transfer before an earlier call brings for this one as well."""

    consumer: str
    move: RowMove


@dataclass(frozen=True, slots=True)
class Feed:
    """What one call needs beside what its devices hold: moves of its own, and parts of earlier calls' transfers.

    `local` are the keys, by producer, that are used from where they were made: no transfer brings them.
    """

    moves: tuple[RowMove, ...]
    shared: tuple[Shared, ...]
    local: Mapping[str, tuple[str, ...]]


def feeds(graph: DataflowGraph, plan: ExecutionPlan) -> dict[str, Feed]:
    """The feed of every call that may lack rows on its devices; the same in every step."""
    found: dict[str, Feed] = {}
    for call in graph:
        keys: dict[tuple[str | None, str], list[str]] = defaultdict(list)  # (earlier consumer, producer) -> keys
        moves = {move.producer: move.keys for move in row_moves(graph, plan, call.name)}
        for producer, moved in moves.items():
            for key in moved:
                keys[_shareable(graph, plan, found, call.name, producer, key), producer].append(key)
        if keys:
            every = [(earlier, RowMove(producer, tuple(names))) for (earlier, producer), names in keys.items()]
            own = tuple(move for earlier, move in every if earlier is None)
            shared = tuple(Shared(earlier, move) for earlier, move in every if earlier is not None)
            used = reads(graph, plan, call.name).items()
            local = {name: tuple(key for key in names if key not in moves.get(name, ())) for name, names in used}
            found[call.name] = Feed(own, shared, local)
    return found


def batches(
    graph: DataflowGraph, plan: ExecutionPlan, consumer: str, moves: Sequence[RowMove]
) -> tuple[tuple[RowMove, ...], ...]:
    """The moves of one call by the transfers that make them: the last has all that need not go ahead.

    A producer's rows go ahead, in a transfer of their own, when that sets devices free: those which neither the
    consumer nor any later producer occupies would else be wanted again when the later rows are made, though they may
    have begun the next step by then.
    """
    levels = CallPriorities.of(graph).levels
    ahead = []
    for move in moves:
        later = [other.producer for other in moves if levels[other.producer] > levels[move.producer]]
        kept = {device for name in (*later, consumer) for device in plan[name].mesh.devices()}
        if later and not kept.issuperset(plan[move.producer].mesh.devices()):
            ahead.append(move)
    rest = tuple(move for move in moves if move not in ahead)
    return (*((move,) for move in ahead), rest) if rest else ()  # the latest producer's rows are never ahead


def _shareable(
    graph: DataflowGraph, plan: ExecutionPlan, found: Mapping[str, Feed], consumer: str, producer: str, key: str
) -> str | None:
    """An earlier call whose transfer brings all that `consumer` needs of this key, without making it wait longer."""
    waits_for = graph.reads_of(consumer).keys()
    for earlier, feed in found.items():
        brings = any(move.producer == producer and key in move.keys for move in feed.moves)
        no_longer = {move.producer for move in feed.moves} <= waits_for
        if brings and no_longer and _covered(graph, plan, consumer, producer, earlier, key):
            return earlier
    return None


def _covered(graph: DataflowGraph, plan: ExecutionPlan, consumer: str, producer: str, earlier: str, key: str) -> bool:
    """Whether what was made there and what the earlier call was brought is all that the consumer needs of the key."""
    held = holds(graph, plan, producer)
    brought = {device: need.share for device, need in needs(graph, plan, earlier).items() if key in need.keys}
    wanted = {
        (need.share, held.get(device), brought.get(device))  # many devices need and hold the same
        for device, need in needs(graph, plan, consumer).items()
        if key in need.keys
    }
    return all(share.surely_within([one for one in there if one is not None]) for share, *there in wanted)
