"""The order of models' visits to a device, and the models that may come between a visit and a call."""

from __future__ import annotations

from collections.abc import Collection, Iterable

import networkx as nx

from prefect_rlhf.placement.augmented.priority import CallPriorities
from prefect_rlhf.placement.augmented.reallocations import trained_behind
from prefect_rlhf.placement.graph import DataflowGraph
from prefect_rlhf.placement.search.problem import Edge


def visits_between(
    graph: DataflowGraph, calls: Collection[str], edges: Iterable[Edge], any_reader: bool = False
) -> dict[tuple[str, str], frozenset[str]]:
    """Return, for a call and a visitor, the calls with models that may keep the two apart; left out if any call may.

    `edges` are the waits of every plan. *Proof.* Let call c of a step not precede visitor i of that step. Its run
    follows the offload of i, or precedes the reload of i, only through the visit of another model to i's devices. A
    model that both i and c wait for in their step came before both. It comes again in the next step. Neither c nor i
    waits for that step, except for the reallocations that a train_step lets pass (`trained_behind`), and for visits
    before these. So it keeps c and i apart only if it is such a reallocation's reader, or if it begins a step. With
    older weights a call may wait for calls of a later step, so all may. With `any_reader` each first call, and each
    reader of trained weights, may keep any two apart.
    """
    if graph.staleness > 0:
        return {}
    before = _before(calls, edges)
    priorities = CallPriorities.of(graph)
    begins = {name for name in calls if priorities.levels[name] == 0}
    trained = {call.role for call in graph if call.kind == "train_step"}
    readers = {name for name in calls if graph.call(name).role in trained and graph.call(name).kind != "train_step"}
    passing: dict[str, set[str]] = {name: begins | readers if any_reader else set() for name in calls}
    for first, second in trained_behind(graph, priorities):
        passing[second.name] |= begins | {name for name in calls if graph.call(name).role == first.role}
    return {
        (running, visitor): frozenset(
            passing[running] | passing[visitor] | (set(calls) - (before[running] & before[visitor]))
        )
        for running in calls
        for visitor in calls
        if running != visitor and running not in before[visitor]
    }


def visits_after(
    graph: DataflowGraph, calls: Collection[str], edges: Iterable[Edge], later: Collection[str]
) -> dict[tuple[str, str], int]:
    """Return by how many iterations a first call's visit is earlier than a second's, if the two exclude each other.

    `edges` are the waits of every plan. Runs of `later` calls belong to the next iteration. *Proof.* Windows are cut
    along an order of the graph: a call follows all that it waits for, and a window waits for the earlier windows of its
    device. A certificate orders a call and a window in the same way. If each call also has a later priority than all
    that it waits for, a step's calls are in the order of their priorities, and precede the next step's calls. Only a
    train_step that lets reallocations of the next step pass (`trained_behind`) may come after later calls of its step.
    These reallocations precede all calls of the next step. With older weights a train_step may wait for a call of the
    next step, so only calls that wait for each other have a certain order. Of a call in parts, take the offload of the
    first window, and the reload of the last.
    """
    priorities, before = CallPriorities.of(graph), _before(calls, edges)
    passing = {second.name for _, second in trained_behind(graph, priorities)}
    place = {name: priorities.call(graph.call(name), 0) for name in calls}
    in_order = graph.staleness == 0 and all(place[each] < place[name] for name in calls for each in before[name])
    ahead = {
        (first, second): 0 if first in before[second] else int(first in passing or place[first] > place[second])
        for first in calls
        for second in calls
        if first != second and (in_order or first in before[second])
    }
    return {pair: lag + (pair[1] in later) - (pair[0] in later) for pair, lag in ahead.items()}


def _before(calls: Collection[str], edges: Iterable[Edge]) -> dict[str, set[str]]:
    """The calls that each call waits for within its step."""
    waits: nx.DiGraph[str] = nx.DiGraph((edge.source, edge.target) for edge in edges if not (edge.lag or edge.without))
    waits.add_nodes_from(calls)
    return {name: nx.ancestors(waits, name) & set(calls) for name in calls}
