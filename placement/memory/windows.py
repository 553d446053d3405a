"""Windows: the nodes during which an offloaded part may be on its devices, in any order of the run."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache

from prefect_rlhf.placement.augmented.augmented_graph import AugmentedGraph
from prefect_rlhf.placement.augmented.node import Node
from prefect_rlhf.placement.augmented.work import HostCopy, Offload, Reload
from prefect_rlhf.placement.plan import ModelInstance, OffloadPart


@dataclass(frozen=True, slots=True)
class Window:
    """From a part's reload to its offload, as positions in the graph; None means to the end."""

    instance: ModelInstance
    part: OffloadPart
    opened: int
    closed: int | None


def windows(augmented: AugmentedGraph) -> list[Window]:
    """Pair each reload with the next offload of the same part."""
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
    """Which nodes must have ended before a node starts, however long each takes.

    These are its dependencies, and each earlier offload or reload that shares a resource with it and has no other
    dependency, because a run starts the earliest of ready nodes.
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
                if not needs & ~mask and not mask >> place & 1 and copy.shares_with(node):
                    mask |= self._before[place] | 1 << place
            self._before.append(mask)
            if isinstance(node.work, HostCopy):
                copies.append((awaited, index, node))

    def precedes(self, first: int, second: int) -> bool:
        """Whether the node at the first position must have ended before the second starts."""
        return bool(self._before[second] >> first & 1)

    def may_be_open(self, window: Window, node: int) -> bool:
        """Whether a window's content may be on the device while a node runs."""
        gone = window.closed is not None and self.precedes(window.closed, node)
        return not gone and not self.precedes(node, window.opened)

    def may_overlap(self, one: Window, other: Window) -> bool:
        """Whether both may be open at once; the windows of the same part of an instance never are."""
        apart = (a.closed is not None and self.precedes(a.closed, b.opened) for a, b in ((one, other), (other, one)))
        return (one.instance, one.part) != (other.instance, other.part) and not any(apart)


class OpenWindows:
    """All windows of a graph: which may be open while a node runs, and which at the same time.

    A set of windows is an integer of bits, by their numbers. They are the same for all devices.
    """

    def __init__(self, augmented: AugmentedGraph) -> None:
        self.windows, self._precedence = windows(augmented), Precedence(augmented)
        overlaps = self._precedence.may_overlap
        self._beside = [_numbers(overlaps(one, other) for other in self.windows) for one in self.windows]
        self._during: dict[int, int] = {}

    def during(self, node: int) -> int:
        """Return the windows that may be open while a node runs."""
        if node not in self._during:
            self._during[node] = _numbers(self._precedence.may_be_open(window, node) for window in self.windows)
        return self._during[node]

    def heaviest(self, able: Sequence[int], num_bytes: Sequence[int]) -> list[int]:
        """Return which of the windows `able` may be open at once and together hold most bytes, in order."""
        beside = tuple(_numbers(self._beside[window] >> other & 1 == 1 for other in able) for window in able)
        chosen = heaviest_clique(tuple(num_bytes), beside)
        return [window for place, window in enumerate(able) if chosen >> place & 1]


def _numbers(holds: Iterable[bool]) -> int:
    return sum(1 << number for number, each in enumerate(holds) if each)


@lru_cache(maxsize=4096)  # the same on many devices, and for many plans
def heaviest_clique(weights: tuple[int, ...], beside: tuple[int, ...]) -> int:
    """Return the clique with the largest sum of weights, the first of equal cliques; `beside` has the edges as sets.

    Few windows overlap, so a search with a simple bound suffices.
    """
    best = best_weight = 0

    def extend(clique: int, weight: int, able: int) -> None:
        nonlocal best, best_weight
        if weight > best_weight:
            best, best_weight = clique, weight
        left = sum(each for place, each in enumerate(weights) if able >> place & 1)
        for place, each in enumerate(weights):
            if able >> place & 1:
                if weight + left <= best_weight:
                    return
                able, left = able ^ 1 << place, left - each
                extend(clique | 1 << place, weight + each, able & beside[place])

    extend(0, 0, (1 << len(weights)) - 1)
    return best
