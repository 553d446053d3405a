"""A builder of augmented graphs: it adds dependencies to nodes."""

from __future__ import annotations

import heapq
from collections import defaultdict
from collections.abc import Iterable

import networkx as nx

from prefect_rlhf.errors.errors import GraphError
from prefect_rlhf.placement.augmented.node import Dependency, Node

Priority = tuple[int, ...]
"""Of two nodes that are ready, the node with the smaller priority goes first; see the module `priority`."""


class GraphBuilder:
    """Nodes by id, each with its priority. The finished AugmentedGraph is frozen."""

    def __init__(self) -> None:
        self.nodes: dict[str, Node] = {}
        self._priority: dict[str, Priority] = {}

    def add(self, node: Node, priority: Priority) -> None:
        assert node.id not in self.nodes, f"two nodes with id {node.id}"
        self.nodes[node.id] = node
        self._priority[node.id] = priority

    def priority(self, node: str) -> Priority:
        return self._priority[node]

    def wait(self, node: str, *dependencies: Dependency) -> None:
        """Add dependencies to `node`. If there are two reasons for a dependency, the first stays."""
        present = self.nodes[node]
        awaited = {*present.depends_on, node}
        added = {d.node: d for d in reversed(dependencies) if d.node not in awaited}
        if added:
            self.nodes[node] = present.after((*present.dependencies, *reversed(added.values())))

    def replace_dependency(self, node: str, old: str, *new: Dependency) -> None:
        """Replace each dependency on `old` by a dependency on `new`."""
        kept = tuple(d for d in self.nodes[node].dependencies if d.node != old)
        self.nodes[node] = self.nodes[node].after(kept)
        self.wait(node, *new)

    def replace_all(self, nodes: Iterable[tuple[Node, Priority]]) -> None:
        """Replace all nodes with these, each with its priority."""
        self.nodes, self._priority = {}, {}
        for node, priority in nodes:
            self.add(node, priority)

    def ordered(self) -> tuple[Node, ...]:
        """Return all nodes in the topological order closest to their priorities.

        Raises GraphError if nodes wait for each other.
        """
        waiting: dict[str, int] = {}
        followers: dict[str, list[str]] = defaultdict(list)
        for node in self.nodes.values():
            awaited = set(node.depends_on)
            waiting[node.id] = len(awaited)
            for before in awaited:
                followers[before].append(node.id)
        ready = [(self._priority[name], name) for name, count in waiting.items() if count == 0]
        heapq.heapify(ready)
        ordered: list[Node] = []
        while ready:
            _, name = heapq.heappop(ready)
            ordered.append(self.nodes[name])
            for follower in followers[name]:
                waiting[follower] -= 1
                if waiting[follower] == 0:
                    heapq.heappush(ready, (self._priority[follower], follower))
        if len(ordered) < len(self.nodes):
            raise self._circle(name for name, count in waiting.items() if count > 0)
        return tuple(ordered)

    def _circle(self, stuck: Iterable[str]) -> GraphError:
        """Name the nodes that wait for each other, not those behind them."""
        waits = nx.DiGraph((before, name) for name in stuck for before in self.nodes[name].depends_on)
        names = [before for before, _ in nx.find_cycle(waits)]
        return GraphError(
            f"{', '.join(sorted(names)[:6])} wait for each other: a weight version is overwritten in place before all "
            "its readers can run; give a reader its own mesh or strategy, or lower staleness"
        )
