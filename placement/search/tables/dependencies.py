"""Dependencies between nodes in every plan: direct dependencies, and the least iterations between any two nodes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache
from itertools import islice, pairwise

import networkx as nx
import numpy as np

from prefect_rlhf.placement.search.compiled import Ints, word
from prefect_rlhf.placement.search.problem import Problem

NEVER = 1 << 40  # a lag that no path has, microseconds that no call takes
LAGS = 3  # 0, 1, and all larger lags together
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


@lru_cache(maxsize=64)  # most problems of a question have the same dependencies
def dependency_arrays(direct: Direct) -> Mapping[str, Ints]:
    """The arrays `depends_on` and `ready_last` of `Tables`."""
    lags = least_lags(direct, own_lag=1)
    nodes = range(len(direct))

    def ended(node: int, source: int) -> bool:
        """Whether `source` of the last iteration has ended when `node` is ready."""
        return any((source == other and lag <= 1) or lags[source, other] <= 1 - lag for other, lag in direct[node])

    by_lag = [[{other for other, lag in pairs if min(lag, LAGS - 1) == row} for pairs in direct] for row in range(LAGS)]
    depends_on = [[word([other in others for other in nodes]) for others in row] for row in by_lag]
    return {
        "depends_on": np.array(depends_on, dtype=np.int64),
        "ready_last": np.array([word([ended(node, source) for source in nodes]) for node in nodes], dtype=np.int64),
    }


def num_dependencies(problem: Problem, iterations: int) -> Ints:
    """The number of nodes that each run waits for, [iterations * V]."""
    direct = direct_dependencies(problem)
    counts = np.zeros((iterations, len(direct)), dtype=np.int64)
    for node, pairs in enumerate(direct):
        for _, lag in pairs:
            counts[lag:, node] += 1
    return counts.ravel()


def least_lags(direct: Direct, own_lag: int = NEVER) -> Ints:
    """The smallest number of iterations, as [u, v], by which v can be ahead of u and still must wait for it.

    With `own_lag` every node waits for its own run so many iterations before.
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


def loops(direct: Direct, covered: Sequence[int] = ()) -> Ints:
    """The loops of dependencies, [loops, 2]: the set of nodes, and the iterations until a run of a node needs the last.

    Those of few iterations and many nodes come first. Left out are loops whose nodes are in a loop of no more
    iterations, or in a set of `covered`, which are loops of an iteration.
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
