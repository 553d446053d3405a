"""Which nodes use which rows on which device: when the last of them has run, the device can free the rows."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping

from prefect_rlhf.placement.augmented.node import Node
from prefect_rlhf.placement.graph import DataflowGraph
from prefect_rlhf.placement.mesh import Device
from prefect_rlhf.placement.plan import ExecutionPlan
from prefect_rlhf.placement.rows.shares import holds, needs

RowKey = tuple[str, str]
"""A call, and a key that it made."""


def row_uses(graph: DataflowGraph, plan: ExecutionPlan, node: Node) -> dict[Device, frozenset[RowKey]]:
    """What of its step's rows a node makes, reads, sends or receives on each device; the same in every step.

    A transfer counts for every device that may send or receive: which of them do depends on the rows' lengths.
    """
    if node.call is None:
        return {}
    made = _made(graph, plan, node.call.name) if node.kind != "transfer" else {}
    read = _read(graph, plan, node)
    return {device: made.get(device, frozenset()) | read.get(device, frozenset()) for device in {**made, **read}}


def use_counts(uses: Iterable[Mapping[Device, frozenset[RowKey]]]) -> Counter[tuple[Device, RowKey]]:
    """How many nodes of a step use each key on each device, from what each of them uses."""
    return Counter((device, key) for by_device in uses for device, keys in by_device.items() for key in keys)


def _made(graph: DataflowGraph, plan: ExecutionPlan, name: str) -> dict[Device, frozenset[RowKey]]:
    outputs = frozenset((name, key) for key in graph.call(name).outputs)
    return dict.fromkeys(holds(graph, plan, name), outputs)


def _read(graph: DataflowGraph, plan: ExecutionPlan, node: Node) -> dict[Device, frozenset[RowKey]]:
    assert node.call is not None  # asked of calls and transfers
    transfer = node.kind == "transfer"
    sources = {move.producer: move.keys for move in node.moves} if transfer else graph.reads_of(node.call.name)
    found: dict[Device, set[RowKey]] = defaultdict(set)
    for device, need in needs(graph, plan, node.call.name).items():
        found[device] |= {(name, key) for name, keys in sources.items() for key in keys if key in need.keys}
    for name in sources if transfer else ():
        for device in holds(graph, plan, name):
            found[device] |= {(name, key) for key in sources[name]}
    return {device: frozenset(keys) for device, keys in found.items()}
