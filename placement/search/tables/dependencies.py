"""Dependencies between nodes in every plan: direct dependencies, and the least iterations between any two nodes."""

from __future__ import annotations

import networkx as nx
import numpy as np

from prefect_rlhf.placement.search.compiled import Ints
from prefect_rlhf.placement.search.problem import Problem

NEVER = 1 << 40  # a lag that no path has, microseconds that no call takes


def direct_dependencies(problem: Problem) -> list[set[tuple[int, int]]]:
    """The direct dependencies of each node: pairs of a node that it waits for and a lag."""
    position = {node.name: index for index, node in enumerate(problem.nodes)}
    direct: list[set[tuple[int, int]]] = [set() for _ in position]
    for edge in (edge for edge in problem.edges if edge.without is None):
        direct[position[edge.target]].add((position[edge.source], edge.lag))
    return direct


def num_dependencies(problem: Problem, iterations: int) -> Ints:
    """The number of nodes that each run waits for, [iterations * V]."""
    direct = direct_dependencies(problem)
    counts = np.zeros((iterations, len(direct)), dtype=np.int64)
    for node, pairs in enumerate(direct):
        for _, lag in pairs:
            counts[lag:, node] += 1
    return counts.ravel()


def least_lags(problem: Problem) -> Ints:
    """The smallest number of iterations, as [u, v], by which v can be ahead of u and still must wait for it."""
    graph: nx.DiGraph[int] = nx.DiGraph()
    nodes = range(len(problem.nodes))
    graph.add_nodes_from(nodes)
    for target, pairs in enumerate(direct_dependencies(problem)):
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
