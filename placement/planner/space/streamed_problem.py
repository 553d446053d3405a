"""Problems that bound plans with streamed parts: some calls run in parts and need not wait for each other.

If every call waits for its whole inputs, the problem without parts bounds the plan: a call's parts run one after
another and together take no less than the whole call (`NodeCosts`), so any two calls that exclude each other do so part
by part. In every other plan some producer streams to a consumer. Then the producer has at least two parts, counted with
their shortest time, and no call on the same rows needs to wait for the end of a call that may stream to it. Calls after
the consumer wait for all parts of both. `docs/internals/plan_search.md` has the proof.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from functools import lru_cache

from prefect_rlhf.placement.cost.workload import CallWork, Workload
from prefect_rlhf.placement.graph import Call, DataflowGraph
from prefect_rlhf.placement.plan import Placement
from prefect_rlhf.placement.planner.space.candidates import CostContext, in_micro_batches, seconds_of, uncut
from prefect_rlhf.placement.planner.space.plan_problem import MICROSECONDS, PlanSpace
from prefect_rlhf.placement.plans.streaming import streamable_pairs
from prefect_rlhf.placement.rows.shares import num_groups
from prefect_rlhf.placement.search.problem import Edge, PlannedCall, Problem


def streamed_problems(space: PlanSpace, most_seconds: float = math.inf) -> Iterator[Problem]:
    """Yield a problem for each call that may stream; together they bound all plans that stream.

    Plans that take `most_seconds` or more need no bound, so options that alone take that long keep their seconds
    without parts.
    """
    graph, whole = space.context.graph, space.computed.problem
    pairs = {(one.name, other.name) for one, other in _free_pairs(graph)}
    relaxed = replace(whole, edges=tuple(_without_waits(whole.edges, pairs)))
    for producer in dict.fromkeys(first for first, _ in sorted(pairs)):
        nodes = (
            _in_parts(node, space, most_seconds) if isinstance(node, PlannedCall) and node.name == producer else node
            for node in relaxed.nodes
        )
        yield replace(relaxed, nodes=tuple(nodes))


def _free_pairs(graph: DataflowGraph) -> Iterator[tuple[Call, Call]]:
    """Yield the pairs that may stream, without a consumer that waits for a computation on the producer's rows."""
    for producer, consumer in streamable_pairs(graph):
        if not any(
            _waits(graph, name, producer.name) for name in graph.reads_of(consumer.name) if _computes(graph, name)
        ):
            yield producer, consumer


def _computes(graph: DataflowGraph, name: str) -> bool:
    return graph.call(name).kind == "compute"


def _waits(graph: DataflowGraph, name: str, producer: str) -> bool:
    """Whether a computation waits for a producer, directly or through computations."""
    reads = graph.reads_of(name)
    return producer in reads or any(_waits(graph, each, producer) for each in reads if _computes(graph, each))


def _without_waits(edges: tuple[Edge, ...], pairs: set[tuple[str, str]]) -> Iterator[Edge]:
    """Yield the edges without those of the pairs; what waits for the second of a pair waits for the first as well."""

    def streams(edge: Edge) -> bool:
        return (edge.source, edge.target) in pairs and edge.lag == 0 and edge.without is None

    kept = [edge for edge in edges if not streams(edge)]
    yield from kept
    known = set(kept)
    pending = [(first, edge) for first, second in sorted(pairs) for edge in kept if edge.source == second]
    for first, edge in pending:
        behind = replace(edge, source=first)
        if edge.without is None and behind not in known and not streams(behind) and behind.target != first:
            known.add(behind)
            yield behind


def _in_parts(planned: PlannedCall, space: PlanSpace, most_seconds: float) -> PlannedCall:
    """The call, each option with its least seconds in two or more parts.

    An option stands for the options that it dominates, and such an option may be the faster of both in parts. So the
    least over all micro-batches and caches counts.
    """
    call, context = space.context.graph.call(planned.name), space.context
    least: dict[Placement, float] = {}
    options = []
    for option, each in zip(planned.options, space.candidates[call.name], strict=True):
        if option.microseconds >= most_seconds * MICROSECONDS:
            options.append(option)
            continue
        kind = replace(uncut(each.placement), offload="none")  # which changes no seconds of the call
        if kind not in least:
            least[kind] = _least_seconds(call, kind, context)
        more = max(0.0, least[kind] - seconds_in_parts(call, each.placement, 1, context))
        options.append(replace(option, microseconds=option.microseconds + int(more * MICROSECONDS)))
    return replace(planned, options=tuple(options))


def _least_seconds(call: Call, kind: Placement, context: CostContext) -> float:
    """Return the least seconds of two or more parts over all micro-batches, if the cache has room for all rows."""
    groups = num_groups(context.graph, call)
    counts = [count for count in range(2, groups + 1) if groups % count == 0]
    ways = list(in_micro_batches(call, kind, context))
    wholes = [seconds_in_parts(call, way, 1, context) for way in ways]
    least = math.inf
    for whole, way in sorted(zip(wholes, ways, strict=True), key=lambda pair: pair[0]):
        if whole >= least:
            break  # its parts count no less, and so do those of all that follow
        in_parts = math.inf
        for count in counts:
            in_parts = min(in_parts, seconds_in_parts(call, way, count, context))
            if in_parts <= whole:
                break  # the whole counts
        least = min(least, max(whole, in_parts))
    return least


def seconds_in_parts(call: Call, placement: Placement, parts: int, context: CostContext) -> float:
    """Return the seconds of all parts of a call, each timed as a separate call, without the cost of new weights."""
    work = _work_of_part(call, parts, context.question.workload)
    return parts * seconds_of(work, context.works(call).sizes, placement, context)


@lru_cache(maxsize=256)  # the same for all placements
def _work_of_part(call: Call, parts: int, workload: Workload) -> CallWork:
    return replace(CallWork.expected(call.cut(parts), workload), new_weights=False)
