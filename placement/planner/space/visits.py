"""The models that may come to a device between another model's visit and a call that leaves no room for that visit."""

from __future__ import annotations

from collections.abc import Collection, Iterable

import networkx as nx

from prefect_rlhf.placement.augmented.priority import CallPriorities
from prefect_rlhf.placement.graph import DataflowGraph
from prefect_rlhf.placement.search.problem import Edge


def visits_between(
    graph: DataflowGraph, calls: Collection[str], edges: Iterable[Edge]
) -> dict[tuple[str, str], frozenset[str]]:
    """Return, for a call and a visitor, the calls with models that may keep the two apart; left out if any call may.

    `edges` are the waits of every plan. *Proof.* Let call c of a step not precede visitor i of that step. Its run
    follows the offload of i only through the reload of another model on i's devices, behind that offload. A model that
    both i and c wait for in their step came before i. It comes again in the next step, and c waits for no call of that
    step, only for moves of new weights to their readers. So it keeps c and i apart only if it is such a reader, or if
    it begins a step, before these moves. With older weights a call may wait for calls of a later step, so all may.
    """
    if graph.staleness > 0:
        return {}
    waits: nx.DiGraph[str] = nx.DiGraph((edge.source, edge.target) for edge in edges if not (edge.lag or edge.without))
    waits.add_nodes_from(calls)
    before = {name: nx.ancestors(waits, name) & set(calls) for name in calls}
    levels = CallPriorities.of(graph).levels
    trained = {call.role for call in graph if call.kind == "train_step"}
    moves = {name for name in calls if graph.call(name).role in trained and graph.call(name).kind != "train_step"}
    free = {name for name in calls if levels[name] == 0} | moves
    return {
        (running, visitor): frozenset(free | (set(calls) - (before[running] & before[visitor])))
        for running in calls
        for visitor in calls
        if running != visitor and running not in before[visitor]
    }
