"""Who goes first: what the rule of the schedule says before any time is known.

Runs are placed in the order in which they become ready (ties: earlier iteration, then earlier node), and a run starts
after all that were placed before it on overlapping meshes. So when everything that run a waits for is waited for by run
b as well, itself or through others, a is ready no later than b, and goes first wherever their meshes overlap.
"""

from __future__ import annotations

from collections.abc import Sequence

import networkx as nx
import numpy as np
from numpy.typing import NDArray

from prefect_rlhf.placement.search.problem import Edge, PlannedCall, Problem

Ints = NDArray[np.int64]
NEVER = 1 << 40  # a lag that no path has, microseconds that no call takes


def turns(problem: Problem) -> dict[str, Ints]:
    """The arrays `waits_in` and `goes_first` of `Tables`."""
    waits = _waits(problem)
    lags = _lags_with_turns(problem, waits)
    count = len(waits)
    first = [
        [[(shift or a < b) and _goes_first(waits, lags, a, b, shift) for b in range(count)] for a in range(count)]
        for shift in (0, 1)
    ]
    following = [
        [[any(source == a and lag == shift for source, lag in waits[b]) for b in range(count)] for a in range(count)]
        for shift in (0, 1)
    ]
    return {
        "waits_in": np.array([[word(row) for row in rows] for rows in following], dtype=np.int64),
        "goes_first": np.array([[word(row) for row in rows] for rows in first], dtype=np.int64),
    }


def word(members: Sequence[bool]) -> int:
    """A set as bits."""
    return sum(1 << index for index, member in enumerate(members) if member)


def _waits(problem: Problem) -> list[list[tuple[int, int]]]:
    """For each node the nodes that it waits for, each with a lag."""
    position = {node.name: index for index, node in enumerate(problem.nodes)}
    waits: list[set[tuple[int, int]]] = [set() for _ in position]
    for edge in problem.edges:
        waits[position[edge.target]].add((position[edge.source], edge.lag))
    return [sorted(found) for found in waits]


def _goes_first(waits: list[list[tuple[int, int]]], lags: Ints, a: int, b: int, shift: int) -> bool:
    """Whether b, `shift` iterations later, waits for the same as a does, or for what waits for that."""

    def covers(source: int, lag: int) -> bool:
        ahead = ((other, shift + lag - other_lag) for other, other_lag in waits[b])
        return any((source == other and apart == 0) or lags[source, other] <= apart for other, apart in ahead)

    return all(covers(source, lag) for source, lag in waits[a])


def _lags_with_turns(problem: Problem, waits: list[list[tuple[int, int]]]) -> Ints:
    """As `least_lags`, where a call also waits for its own last run if that goes first."""
    own: list[Edge] = []
    while True:
        lags = least_lags(problem, own)
        more = [
            Edge(node.name, node.name, 1)
            for index, node in enumerate(problem.nodes)
            if isinstance(node, PlannedCall) and lags[index, index] > 1 and _goes_first(waits, lags, index, index, 1)
        ]
        if not more:
            return lags
        own += more


def least_lags(problem: Problem, more: Sequence[Edge] = ()) -> Ints:
    """[u, v]: the smallest number of iterations by which v can be ahead of u and still must wait for it."""
    position = {node.name: index for index, node in enumerate(problem.nodes)}
    graph: nx.DiGraph[int] = nx.DiGraph()
    graph.add_nodes_from(position.values())
    for edge in sorted((*problem.edges, *more), key=lambda edge: -edge.lag):  # of parallel edges the smallest lag stays
        graph.add_edge(position[edge.source], position[edge.target], lag=edge.lag)
    lags = np.full((len(position), len(position)), NEVER, dtype=np.int64)
    for source, found in nx.all_pairs_dijkstra_path_length(graph, weight="lag"):
        for target, lag in found.items():
            lags[source, target] = lag if source != target else NEVER
    for source in graph:
        around = [lag["lag"] + lags[target, source] for _, target, lag in graph.out_edges(source, data=True)]
        own = [data["lag"] for _, target, data in graph.out_edges(source, data=True) if target == source]
        lags[source, source] = min([NEVER, *around, *own])
    return lags
