"""The rows that each node uses on each device, so that a device can free a row after its last use."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from typing import assert_never

from prefect_rlhf.placement.augmented.node import Node
from prefect_rlhf.placement.augmented.work import (
    Checkpoint,
    Commit,
    Compute,
    Export,
    Follow,
    HostCopy,
    ModelCall,
    Reallocate,
    Transfer,
)
from prefect_rlhf.placement.devices.mesh import Device
from prefect_rlhf.placement.graph import DataflowGraph
from prefect_rlhf.placement.plan import ExecutionPlan
from prefect_rlhf.placement.rows.shares import placed_by_row_set, rows_held

RowKey = tuple[str, str]
"""A call, and a key that it made."""


def row_uses(graph: DataflowGraph, plan: ExecutionPlan, node: Node) -> dict[Device, frozenset[RowKey]]:
    """Return the rows of its step that a node makes, reads, sends or receives on each device; the same in every step.

    A transfer counts for every device that may send or receive, because the rows' lengths decide which of them do.
    """
    uses: dict[Device, set[RowKey]] = defaultdict(set)
    sources: Mapping[str, tuple[str, ...]]  # keys by the call that made them
    match node.work:
        case Transfer(call, moves):
            held = sources = {move.producer: move.keys for move in moves}
        case ModelCall(call) | Compute(call):
            sources, held = graph.reads_of(call.name), {call.name: call.outputs}
        case Reallocate() | Follow() | HostCopy() | Checkpoint() | Commit() | Export():
            return {}
        case _:
            assert_never(node.work)
    for producer, keys in held.items():
        for device in rows_held(graph, plan, producer):
            uses[device] |= {(producer, key) for key in keys}
    for placed in placed_by_row_set(graph, plan, call.name):
        read = [(producer, key) for producer in graph.keys_read(placed.call) for key in sources.get(producer, ())]
        for device, need in placed.needs().items():
            uses[device] |= {(producer, key) for producer, key in read if key in need.keys}
    return {device: frozenset(keys) for device, keys in uses.items()}


def use_counts(uses: Iterable[Mapping[Device, frozenset[RowKey]]]) -> Counter[tuple[Device, RowKey]]:
    """Count how many nodes of a step use each key on each device, given each node's uses."""
    return Counter((device, key) for by_device in uses for device, keys in by_device.items() for key in keys)
