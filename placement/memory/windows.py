"""Which nodes may run at the same time as which, in every order that a run may take."""

from __future__ import annotations

from dataclasses import dataclass

from prefect_rlhf.placement.augmented.augmented_graph import AugmentedGraph
from prefect_rlhf.placement.plan import ModelInstance, OffloadPart


@dataclass(frozen=True, slots=True)
class _Window:
    """From the reload of a part of an instance to its offload, by position in the graph; None: to the end."""

    instance: ModelInstance
    part: OffloadPart
    opened: int
    closed: int | None


class _Order:
    """Which nodes must have ended before which others start, in whatever order a run takes."""

    def __init__(self, augmented: AugmentedGraph) -> None:
        position = {node.id: index for index, node in enumerate(augmented.nodes)}
        self._before: list[int] = []
        for node in augmented.nodes:
            mask = 0
            for name in node.depends_on:
                mask |= self._before[position[name]] | 1 << position[name]
            self._before.append(mask)

    def precedes(self, one: int, other: int) -> bool:
        return bool(self._before[other] >> one & 1)

    def may_be_open(self, window: _Window, node: int) -> bool:
        """Whether a window's content may be there while a node runs."""
        gone = window.closed is not None and self.precedes(window.closed, node)
        return not gone and not self.precedes(node, window.opened)

    def may_overlap(self, one: _Window, other: _Window) -> bool:
        """Whether both may be open at once; an instance comes and goes one window at a time."""
        apart = (a.closed is not None and self.precedes(a.closed, b.opened) for a, b in ((one, other), (other, one)))
        return one.instance != other.instance and not any(apart)


def _opened(window: _Window) -> int:
    return window.opened


def _windows(augmented: AugmentedGraph) -> list[_Window]:
    """Each reload with the offload of the same part that comes next."""
    found: list[_Window] = []
    opened: dict[tuple[ModelInstance, OffloadPart], int] = {}
    for index, node in enumerate(augmented.nodes):
        if node.kind in ("reload", "offload"):
            assert node.instance is not None  # set for both kinds
            if node.kind == "reload":
                opened[node.instance, node.part] = index
            else:
                found.append(_Window(node.instance, node.part, opened.pop((node.instance, node.part), 0), index))
    return found + [_Window(instance, part, index, None) for (instance, part), index in opened.items()]
