"""Streamed parts: which calls may stream rows to each other, and plans that cut these calls."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from prefect_rlhf.placement.graph import Call, DataflowGraph
from prefect_rlhf.placement.plan import ExecutionPlan
from prefect_rlhf.placement.plans.check import violations
from prefect_rlhf.placement.rows.shares import num_groups

CUTTABLE = ("generate", "inference")


def streamable_pairs(graph: DataflowGraph) -> Iterator[tuple[Call, Call]]:
    """Yield each producer and consumer such that parts of the consumer may begin before the producer has ended.

    Both work on the same rows, in several groups, and no call has selected among them.
    """
    for consumer in graph:
        for name in graph.reads_of(consumer.name):
            producer = graph.call(name)
            cuttable = producer.kind in CUTTABLE and consumer.kind in CUTTABLE and not consumer.rows.choices
            if cuttable and producer.rows == consumer.rows and num_groups(graph, consumer) > 1:
                yield producer, consumer


def streaming_calls(graph: DataflowGraph, plan: ExecutionPlan) -> tuple[str, ...]:
    """Return the calls of all pairs that may stream and that have different devices under the plan."""
    pairs = ((one.name, other.name) for one, other in streamable_pairs(graph))
    apart = (pair for pair in pairs if not plan[pair[0]].mesh.overlaps(plan[pair[1]].mesh))
    return tuple(dict.fromkeys(name for pair in apart for name in pair))


def in_parts(graph: DataflowGraph, plan: ExecutionPlan, parts: int) -> ExecutionPlan:
    """Cut the plan's `streaming_calls` into `parts` parts, halving the number until the plan is legal."""
    placements = dict(plan.placements)
    for name in streaming_calls(graph, plan):
        call, count = graph.call(name), parts
        backend = plan.cluster.backend
        while count > 1 and any(violations(call, replace(placements[name], parts=count), graph, backend)):
            count //= 2
        placements[name] = replace(placements[name], parts=max(1, count))
    return replace(plan, placements=tuple(placements.items()))
