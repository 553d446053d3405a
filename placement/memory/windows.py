"""Windows: the nodes during which an offloaded part of an instance may be on its devices, in any order of the run."""

from __future__ import annotations

from dataclasses import dataclass

from prefect_rlhf.placement.augmented.augmented_graph import AugmentedGraph
from prefect_rlhf.placement.augmented.node import Node
from prefect_rlhf.placement.augmented.work import HostCopy, Offload, Reload
from prefect_rlhf.placement.plan import ModelInstance, OffloadPart


@dataclass(frozen=True, slots=True)
class Window:
    """The time from the reload of a part of an instance to its offload, by position in the graph; None: to the end."""

    instance: ModelInstance
    part: OffloadPart
    opened: int
    closed: int | None


def windows(augmented: AugmentedGraph) -> list[Window]:
    """Pair each reload with the offload of the same part that comes next."""
    closed: list[Window] = []
    opened: dict[tuple[ModelInstance, OffloadPart], int] = {}
    for index, node in enumerate(augmented.nodes):
        match node.work:
            case Reload(instance, part):
                opened[instance, part] = index
            case Offload(instance, part):
                closed.append(Window(instance, part, opened.pop((instance, part), 0), index))
    return closed + [Window(instance, part, index, None) for (instance, part), index in opened.items()]


class Precedence:
    """The nodes that must have ended before others start, however long each takes.

    They are a node's dependencies, and each earlier offload and reload that shares a resource with it and has no other
    dependency: of ready nodes, a run begins the earlier.
    """

    def __init__(self, augmented: AugmentedGraph) -> None:
        position = {node.id: index for index, node in enumerate(augmented.nodes)}
        self._before: list[int] = []
        copies: list[tuple[int, int, Node]] = []  # offloads and reloads: the dependencies of each, and its position
        for index, node in enumerate(augmented.nodes):
            awaited = sum(1 << position[name] for name in node.depends_on)
            mask = awaited
            for name in node.depends_on:
                mask |= self._before[position[name]]
            for needs, place, copy in copies:
                if not needs & ~mask and not mask >> place & 1 and not copy.occupies.isdisjoint(node.occupies):
                    mask |= self._before[place] | 1 << place
            self._before.append(mask)
            if isinstance(node.work, HostCopy):
                copies.append((awaited, index, node))

    def precedes(self, first: int, second: int) -> bool:
        """Return whether the node at the first position must have ended before the other starts."""
        return bool(self._before[second] >> first & 1)

    def may_be_open(self, window: Window, node: int) -> bool:
        """Return whether a window's content may be there while a node runs."""
        gone = window.closed is not None and self.precedes(window.closed, node)
        return not gone and not self.precedes(node, window.opened)

    def may_overlap(self, one: Window, other: Window) -> bool:
        """Return whether both may be open at once; the windows of a single instance never overlap."""
        apart = (a.closed is not None and self.precedes(a.closed, b.opened) for a, b in ((one, other), (other, one)))
        return one.instance != other.instance and not any(apart)
