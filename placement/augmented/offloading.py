"""When what does not stay on its devices, an instance or its optimizer, comes and goes.

Along one topological order, each use of an offloaded part opens a window: `reload` before its first use, `offload`
after its last. A window ends with its step, or when another offloaded part needs one of the same devices; so at any
time at most one of them is on a device, and windows cut from one order can never wait for each other.

A reload runs beside the last call that its first use waits for, and no earlier: the copy is hidden behind that call,
and until then the memory is free.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from prefect_rlhf.placement.augmented.graph_builder import GraphBuilder
from prefect_rlhf.placement.augmented.node import Dependency, Node
from prefect_rlhf.placement.augmented.priority import just_after, just_before
from prefect_rlhf.placement.graph import DataflowGraph
from prefect_rlhf.placement.plan import (
    ExecutionPlan,
    ModelInstance,
    OffloadPart,
    built_version,
    labels,
    offloaded_parts,
)

_OPTIMIZER_USERS = ("train_step", "checkpoint")
_MODEL_CALLS = ("generate", "inference", "train_step")


@dataclass(slots=True, eq=False)
class _Window:
    """Consecutive uses of one instance, or of its optimizer, in one step.

    `version` is what it held when it was reloaded; `after` are windows on a common device that ended before.
    """

    instance: ModelInstance
    part: OffloadPart
    step: int
    number: int
    version: int
    after: tuple[_Window, ...]
    uses: list[str] = field(default_factory=list)

    def named(self, kind: str, name: str) -> str:
        """Id of its reload or offload; numbered when the instance comes and goes more than once in a step."""
        part = "" if self.part == "all" else f".{self.part}"
        return f"{kind}.{name}{part}{f'.{self.number}' if self.number > 1 else ''}@{self.step}"

    @property
    def subject(self) -> str:
        """What comes and goes, for people."""
        return self.instance.name if self.part == "all" else f"the {self.part} of {self.instance.name}"


class _Windows:
    """All windows in the order in which they open; walks the nodes in a topological order."""

    def __init__(
        self, parts: Mapping[ModelInstance, OffloadPart], held: Mapping[ModelInstance, int], first_step: int
    ) -> None:
        self._parts = parts
        self._first_step = first_step
        self.all: list[_Window] = []
        self._held = dict(held)
        self._opened: dict[ModelInstance, _Window] = {}
        self._closed: dict[ModelInstance, _Window] = {}  # the latest of each instance
        self._count: Counter[tuple[ModelInstance, int]] = Counter()

    def visit(self, node: Node) -> None:
        uses = [(i, max(step, self._first_step)) for i, step in _uses(node, self._parts)]
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
        count, version = self._count[instance, step], self._held[instance]
        window = _Window(instance, self._parts[instance], step, count, version, after)
        self._opened[instance] = window
        self.all.append(window)

    def _close(self, instance: ModelInstance) -> None:
        window = self._opened.pop(instance)
        for earlier in window.after:  # whoever would wait for it waits for this window, which did
            if instance.mesh.contains(earlier.instance.mesh) and self._closed.get(earlier.instance) is earlier:
                del self._closed[earlier.instance]
        self._closed[instance] = window


def add_offloads(draft: GraphBuilder, graph: DataflowGraph, plan: ExecutionPlan, first_step: int = 0) -> None:
    """Insert `reload` and `offload` around the uses of everything that the plan offloads."""
    parts = offloaded_parts(graph, plan)
    held = {instance: built_version(graph, plan, instance, first_step) for instance in parts}
    windows = _Windows(parts, held, first_step)
    for node in draft.ordered():
        windows.visit(node)
    names = labels(graph, plan)
    for window in windows.all:
        _insert(draft, window, names)


def _uses(node: Node, parts: Mapping[ModelInstance, OffloadPart]) -> Iterator[tuple[ModelInstance, int]]:
    """The instances of which a node uses what comes and goes, each with the step it is counted to.

    A version is taken from the instance that trained it while that is still on its devices: in the step it was trained.
    """
    every = [] if node.instance is None else [(node.instance, node.step)]
    if node.kind == "reallocate":
        assert node.source is not None and node.target is not None and node.reads is not None
        every = [(node.source, node.reads - 1), (node.target, node.step)]
    for instance, step in every:
        part = parts.get(instance)
        if part == "all" or (part == "optimizer" and node.kind in _OPTIMIZER_USERS):
            yield instance, step


def _insert(draft: GraphBuilder, window: _Window, names: dict[ModelInstance, str]) -> None:
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
        reason=f"{first} uses {window.subject}, which is in host memory.",
        instance=instance,
        reads=window.version,
        part=window.part,
    )
    arrived = (node.reads for node in uses if node.target == instance)
    versions = (window.version, *(node.writes for node in uses), *arrived)
    offload = Node(
        id=window.named("offload", name),
        kind="offload",
        step=max(node.step for node in uses),
        meshes=(instance.mesh,),
        dependencies=tuple(Dependency(node.id, "memory", window.subject) for node in uses),
        reason=f"{last} is the last to use {window.subject} for now, and the plan offloads it.",
        instance=instance,
        reads=max(version for version in versions if version is not None),
        part=window.part,
    )
    before = _not_before(draft, uses[0])
    draft.add(reload, just_before(draft.priority(first), 2))
    draft.wait(reload.id, *(Dependency(id, "memory", "not needed earlier") for id in before))
    draft.add(offload, just_after(draft.priority(last), 2))
    for node in uses:
        draft.wait(node.id, Dependency(reload.id, "memory", window.subject))


def _not_before(draft: GraphBuilder, first: Node) -> tuple[str, ...]:
    """What must have ended before a reload for `first` may begin: whatever the last call that `first` waits for awaits.

    For a reallocate, all that it waits for: what comes back for it is about to be overwritten, so nothing is gained.
    """
    if first.kind == "reallocate":
        return first.depends_on
    calls = _awaited_calls(draft, first)
    return max(calls, key=lambda call: draft.priority(call.id)).depends_on if calls else ()


def _awaited_calls(draft: GraphBuilder, node: Node) -> list[Node]:
    """The model function calls that `node` waits for, directly or through moves and computations."""
    found: dict[str, Node] = {}
    pending = [draft.nodes[id] for id in node.depends_on]
    while pending:
        current = pending.pop()
        if current.id in found:
            continue
        found[current.id] = current
        if current.kind not in _MODEL_CALLS:
            pending.extend(draft.nodes[id] for id in current.depends_on)
    return [one for one in found.values() if one.kind in _MODEL_CALLS]
