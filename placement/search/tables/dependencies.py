"""Dependencies between nodes in every plan: direct dependencies, and the smallest lag between any two nodes."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from itertools import islice, pairwise

import networkx as nx
import numpy as np

from prefect_rlhf.placement.search.compiled import Ints
from prefect_rlhf.placement.search.problem import Problem

NEVER = 1 << 40  # a lag that no path has, microseconds that no call takes
MOST_LOOPS = 32  # that a bound counts
MOST_LISTED = 2_000  # of which these are chosen


Direct = tuple[frozenset[tuple[int, int]], ...]
"""The direct dependencies of each node: pairs of a node that it waits for and a lag."""


def direct_dependencies(problem: Problem) -> Direct:
    """Return the dependencies that hold in every plan."""
    position = {node.name: index for index, node in enumerate(problem.nodes)}
    direct: list[set[tuple[int, int]]] = [set() for _ in position]
    for edge in (edge for edge in problem.edges if edge.without is None):
        direct[position[edge.target]].add((position[edge.source], edge.lag))
    return tuple(map(frozenset, direct))


def num_dependencies(problem: Problem, iterations: int) -> Ints:
    """How many nodes each run waits for, [iterations * V]."""
    direct = direct_dependencies(problem)
    counts = np.zeros((iterations, len(direct)), dtype=np.int64)
    for node, pairs in enumerate(direct):
        for _, lag in pairs:
            counts[lag:, node] += 1
    return counts.ravel()


def least_lags(direct: Direct, own_lag: int = NEVER) -> Ints:
    """The smallest number of iterations, as [u, v], by which v is ahead of u when it has to wait for it.

    With `own_lag`, every node also waits for its own run that many iterations before.
    """
    graph: nx.DiGraph[int] = nx.DiGraph()
    nodes = range(len(direct))
    graph.add_nodes_from(nodes)
    if own_lag < NEVER:
        graph.add_edges_from(((node, node) for node in nodes), lag=own_lag)
    for target, pairs in enumerate(direct):
        for source, lag in sorted(pairs, key=lambda pair: -pair[1]):  # of parallel edges the smallest lag stays
            graph.add_edge(source, target, lag=lag)
    lags = np.full((len(nodes), len(nodes)), NEVER, dtype=np.int64)
    for source, lag_to in nx.all_pairs_dijkstra_path_length(graph, weight="lag"):
        for target, distance in lag_to.items():
            lags[source, target] = distance if source != target else NEVER
    for source in graph:
        around = [edge["lag"] + lags[target, source] for _, target, edge in graph.out_edges(source, data=True)]
        own = [edge["lag"] for _, target, edge in graph.out_edges(source, data=True) if target == source]
        lags[source, source] = min([NEVER, *around, *own])
    return lags


def anchors_of(lags: Ints, iterations: int) -> list[int]:
    """The first node of each cycle through the iterations; in a cycle, nodes wait for each other's past runs.

    Without a cycle, it is the problem's first node, which has no predecessor.
    """
    anchors: list[int] = []
    for node in range(len(lags)):
        on_cycle = lags[node, node] < iterations
        if on_cycle and not any(lags[node, other] + lags[other, node] < NEVER for other in anchors):
            anchors.append(node)
    return anchors or [0]


@lru_cache(maxsize=64)  # most problems of a question have the same dependencies
def lags_with_own(direct: Direct) -> Ints:
    """Return `least_lags`, with each node's own run 0 iterations ahead."""
    lags = least_lags(direct)
    np.fill_diagonal(lags, 0)
    return lags


def loops(direct: Direct, covered: Sequence[int] = ()) -> Ints:
    """The loops of dependencies, [loops, 2]: the set of nodes, and after how many iterations a node's run needs its own
    result.

    Loops of few iterations and many nodes come first. A loop is left out if its nodes are in a loop of no more
    iterations, or in a set of `covered`, the loops of one iteration.
    """
    graph: nx.DiGraph[int] = nx.DiGraph()
    for target, pairs in enumerate(direct):
        for source, lag in sorted(pairs, key=lambda pair: -pair[1]):  # of parallel edges the smallest lag stays
            graph.add_edge(source, target, lag=lag)
    found: dict[int, int] = {}
    for nodes in islice(nx.simple_cycles(graph), MOST_LISTED):
        lag = sum(graph[source][target]["lag"] for source, target in pairwise([*nodes, nodes[0]]))
        members = sum(1 << node for node in nodes)
        found[members] = min(lag, found.get(members, NEVER))
    kept = [(members, 1) for members in covered]
    for members, lag in sorted(found.items(), key=lambda loop: (loop[1], -loop[0].bit_count(), loop)):
        if len(kept) < len(covered) + MOST_LOOPS and not any(members & ~other == 0 for other, _ in kept):
            kept.append((members, lag))
    return np.array(kept[len(covered) :], dtype=np.int64).reshape(-1, 2)
