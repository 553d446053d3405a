"""When an instance that does not stay on its devices comes and goes.

Along one topological order, each use of an offloaded instance opens a window: `reload` before its first use, `offload`
after its last. A window ends with its step, or when another offloaded instance needs one of the same devices; so at any
time at most one offloaded instance is on a device, and windows cut from one order can never wait for each other.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from prefect_rlhf.placement.draft import Draft
from prefect_rlhf.placement.graph import DataflowGraph
from prefect_rlhf.placement.instances import labels, offloaded_instances
from prefect_rlhf.placement.node import Dependency, Node
from prefect_rlhf.placement.order import just_after, just_before
from prefect_rlhf.placement.plan import ExecutionPlan, ModelInstance


@dataclass(slots=True, eq=False)
class _Window:
    """Consecutive uses of one instance in one step.

    `version` is what it held when it was reloaded; `after` are windows on a common device that ended before.
    """

    instance: ModelInstance
    step: int
    number: int
    version: int
    after: tuple[_Window, ...]
    uses: list[str] = field(default_factory=list)

    def named(self, kind: str, name: str) -> str:
        """Id of its reload or offload; numbered when the instance comes and goes more than once in a step."""
        return f"{kind}.{name}{f'.{self.number}' if self.number > 1 else ''}@{self.step}"


class _Windows:
    """All windows in the order in which they open; walks the nodes in a topological order."""

    def __init__(self, offloaded: tuple[ModelInstance, ...]) -> None:
        self.all: list[_Window] = []
        self._held = dict.fromkeys(offloaded, 0)
        self._opened: dict[ModelInstance, _Window] = {}
        self._closed: dict[ModelInstance, _Window] = {}  # the latest of each instance
        self._count: Counter[tuple[ModelInstance, int]] = Counter()

    def visit(self, node: Node) -> None:
        uses = [(instance, step) for instance, step in _uses(node) if instance in self._held]
        together = [instance for instance, _ in uses]  # a reallocate needs both its instances at once
        for instance, step in uses:
            if (window := self._opened.get(instance)) is not None and window.step != step:
                self._close(instance)
            for other in [other for other in self._opened if other.mesh.overlaps(instance.mesh)]:
                if other not in together:
                    self._close(other)
        for instance, step in uses:
            if instance not in self._opened:
                self._open(instance, step)
            self._opened[instance].uses.append(node.id)
            if node.writes is not None:
                self._held[instance] = node.writes
            elif node.target == instance and node.reads is not None:
                self._held[instance] = node.reads

    def _open(self, instance: ModelInstance, step: int) -> None:
        self._count[instance, step] += 1
        after = tuple(window for other, window in self._closed.items() if other.mesh.overlaps(instance.mesh))
        window = _Window(instance, step, self._count[instance, step], self._held[instance], after)
        self._opened[instance] = window
        self.all.append(window)

    def _close(self, instance: ModelInstance) -> None:
        window = self._opened.pop(instance)
        for earlier in window.after:  # whoever would wait for it waits for this window, which did
            if instance.mesh.contains(earlier.instance.mesh) and self._closed.get(earlier.instance) is earlier:
                del self._closed[earlier.instance]
        self._closed[instance] = window


def add_offloads(draft: Draft, graph: DataflowGraph, plan: ExecutionPlan) -> None:
    """Insert `reload` and `offload` around the uses of every instance that the plan offloads."""
    windows = _Windows(offloaded_instances(graph, plan))
    for node in draft.ordered():
        windows.visit(node)
    names = labels(graph, plan)
    for window in windows.all:
        _insert(draft, window, names)


def _uses(node: Node) -> list[tuple[ModelInstance, int]]:
    """The instances that a node uses, each with the step it is counted to.

    A version is taken from the instance that trained it while that is still on its devices: in the step it was trained.
    """
    if node.kind == "reallocate":
        assert node.source is not None and node.target is not None and node.reads is not None
        return [(node.source, node.reads - 1), (node.target, node.step)]
    return [] if node.instance is None else [(node.instance, node.step)]


def _insert(draft: Draft, window: _Window, names: dict[ModelInstance, str]) -> None:
    """Add the window's two nodes around its uses."""
    instance, uses = window.instance, [draft.nodes[use] for use in window.uses]
    first, last, name = uses[0].id, uses[-1].id, names[instance]
    left = [earlier.named("offload", names[earlier.instance]) for earlier in window.after]
    reload = Node(
        id=window.named("reload", name),
        kind="reload",
        step=window.step,
        meshes=(instance.mesh,),
        dependencies=tuple(Dependency(id, "memory", "device memory") for id in left),
        reason=f"{first} uses {instance.name}, which is in host memory.",
        instance=instance,
        reads=window.version,
    )
    arrived = (node.reads for node in uses if node.target == instance)
    versions = (window.version, *(node.writes for node in uses), *arrived)
    offload = Node(
        id=window.named("offload", name),
        kind="offload",
        step=max(node.step for node in uses),
        meshes=(instance.mesh,),
        dependencies=tuple(Dependency(node.id, "memory", instance.name) for node in uses),
        reason=f"{last} is the last to use {instance.name} for now, and the plan offloads it.",
        instance=instance,
        reads=max(version for version in versions if version is not None),
    )
    draft.add(reload, just_before(draft.priority(first), 2))
    draft.add(offload, just_after(draft.priority(last), 2))
    for node in uses:
        draft.wait(node.id, Dependency(reload.id, "memory", instance.name))
