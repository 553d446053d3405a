"""Cuts calls into parts: each part of a call's rows becomes a node, and so does each move of rows for it.

If both calls work on the same rows, and one number of parts divides the other, a part waits only for the parts of its
input that contain its rows. Otherwise it waits for the whole input. A call's parts run in order. If a part has a single
producer, its rows move before the producer's next part begins, because both need the producer's devices.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace

from prefect_rlhf.placement.augmented.graph_builder import GraphBuilder, Priority
from prefect_rlhf.placement.augmented.node import Dependency, Node
from prefect_rlhf.placement.augmented.work import ModelCall, Transfer
from prefect_rlhf.placement.graph import Call, DataflowGraph
from prefect_rlhf.placement.plan import ExecutionPlan
from prefect_rlhf.placement.rows.partition import Part

SPACING = 8  # between the priorities of parts: an offload of the call's model lies directly behind its last part


def streams(producer: Call, consumer: Call, plan: ExecutionPlan) -> bool:
    """Whether a consumer's parts begin before its producer has ended."""
    before, after = plan.parts(producer.name), plan.parts(consumer.name)
    aligned = before % after == 0 or after % before == 0
    return min(before, after) > 1 and aligned and producer.rows == consumer.rows


def cut_into_parts(builder: GraphBuilder, graph: DataflowGraph, plan: ExecutionPlan) -> None:
    """Replace each node of a call that the plan cuts by a node per part, and adapt the dependencies on it."""
    if all(placement.parts == 1 for _, placement in plan.placements):
        return
    counts = {node.id: _count(node, graph, plan) for node in builder.nodes.values()}
    priorities: dict[str, Priority] = {}
    cut: list[Node] = []
    for node in builder.ordered():
        priority = builder.priority(node.id)
        for piece in _pieces(node, builder.nodes, counts, plan):
            awaited = [priorities[name] for name in piece.depends_on if name in priorities]
            if piece.part.of == 1:
                priorities[piece.id] = priority
            elif isinstance(piece.work, Transfer):
                priorities[piece.id] = *max(awaited), 1
            else:
                priorities[piece.id] = *priority, SPACING * piece.part.index
            cut.append(piece)
    builder.replace_all((node, priorities[node.id]) for node in cut)


def _count(node: Node, graph: DataflowGraph, plan: ExecutionPlan) -> int:
    """Return the number of parts of a node; a transfer has parts if some of its rows come part by part."""
    work = node.work
    if isinstance(work, Transfer) and not any(streams(graph.call(m.producer), work.call, plan) for m in work.moves):
        return 1
    return plan.parts(work.call.name) if isinstance(work, ModelCall | Transfer) else 1


def _pieces(node: Node, nodes: Mapping[str, Node], counts: Mapping[str, int], plan: ExecutionPlan) -> Iterator[Node]:
    """Yield the nodes of a node's parts, or the node itself, with dependencies on parts."""
    count, work = counts[node.id], node.work
    for index in range(count):
        part = Part(index, count)
        waits = [each for before in node.dependencies for each in _on_parts(before, node, part, nodes, counts, plan)]
        if count == 1 or not isinstance(work, ModelCall | Transfer):
            yield replace(node, dependencies=tuple(waits))
            continue
        if index and isinstance(work, ModelCall):
            waits.append(Dependency(_id(node.id, Part(index - 1, count)), "order", str(Part(index - 1, count))))
        reason = f"{node.reason} The plan cuts its rows into {count} parts."
        yield replace(
            node, id=_id(node.id, part), dependencies=tuple(waits), reason=reason, work=replace(work, part=part)
        )


def _on_parts(
    awaited: Dependency,
    node: Node,
    part: Part,
    nodes: Mapping[str, Node],
    counts: Mapping[str, int],
    plan: ExecutionPlan,
) -> Iterator[Dependency]:
    """Yield a dependency on each part that a part of a node waits for."""
    count = counts.get(awaited.node, 1)
    if count == 1:
        yield awaited
        return
    before = nodes[awaited.node]
    by_part = awaited.kind == "data" and before.call and node.call and streams(before.call, node.call, plan)
    for other in (Part(index, count) for index in range(count)):
        if not by_part or other.meets(part):
            yield replace(awaited, node=_id(awaited.node, other))


def _id(node: str, part: Part) -> str:
    """Return a part's id within a node.

    >>> _id("actor_generate@3", Part(1, 4))
    'actor_generate.2of4@3'
    """
    subject, _, step = node.rpartition("@")
    return f"{subject}.{part.index + 1}of{part.of}@{step}"
