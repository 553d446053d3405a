"""What waits for what, whatever the plan: directly, and how many iterations apart at least."""

from __future__ import annotations

import networkx as nx
import numpy as np

from prefect_rlhf.placement.search.compiled import Ints, word
from prefect_rlhf.placement.search.problem import Problem

NEVER = 1 << 40  # a lag that no path has, microseconds that no call takes
LAGS = 3  # 0, 1, and all larger ones together


def wait_arrays(problem: Problem) -> dict[str, Ints]:
    """The arrays `waits_for` and `ready_last` of `Tables`."""
    waits = _waits(problem)
    lags = least_lags(problem, own_lag=1)
    nodes = range(len(waits))

    def ended(node: int, source: int) -> bool:
        """Whether `source` of the last iteration has ended when `node` is ready."""
        return any((source == other and lag <= 1) or lags[source, other] <= 1 - lag for other, lag in waits[node])

    waits_for = [[word([(u, lag) in found for u in nodes]) for found in waits] for lag in range(LAGS - 1)]
    waits_for.append([word([any(u == v and lag >= LAGS - 1 for v, lag in found) for u in nodes]) for found in waits])
    return {
        "waits_for": np.array(waits_for, dtype=np.int64),
        "ready_last": np.array([word([ended(node, source) for source in nodes]) for node in nodes], dtype=np.int64),
    }


def _waits(problem: Problem) -> list[set[tuple[int, int]]]:
    """For each node the nodes that it waits for, each with a lag."""
    position = {node.name: index for index, node in enumerate(problem.nodes)}
    waits: list[set[tuple[int, int]]] = [set() for _ in position]
    for edge in problem.edges:
        waits[position[edge.target]].add((position[edge.source], edge.lag))
    return waits


def least_lags(problem: Problem, own_lag: int = NEVER) -> Ints:
    """[u, v]: the smallest number of iterations by which v can be ahead of u and still must wait for it.

    With `own_lag` every node waits for its own run so many iterations before.
    """
    position = {node.name: index for index, node in enumerate(problem.nodes)}
    graph: nx.DiGraph[int] = nx.DiGraph()
    graph.add_nodes_from(position.values())
    if own_lag < NEVER:
        graph.add_edges_from(((node, node) for node in position.values()), lag=own_lag)
    for edge in sorted(problem.edges, key=lambda edge: -edge.lag):  # of parallel edges the smallest lag stays
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
