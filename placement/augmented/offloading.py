"""Inserts a reload before and an offload after each period in which an offloaded instance, or a part of it, is used.

Along a topological order, the uses of an offloaded part form windows: `reload` before the first use, `offload` after
the last. A window ends with its step, or when another offloaded instance needs a shared device. So a device holds at
most one offloaded instance at any time, and windows cut from a single order never wait for each other. A trained
instance that is offloaded completely has two parts with windows of their own: the optimizer is loaded only for its
train_step, the weights for every use. The checkpoint of a run that was asked to stop has a separate window, because the
windows of its step may already be submitted.

An offload copies to the host only if a later reload needs the copy and the host's present copy differs; frozen weights,
for example, are simply dropped. Weights that the next window begins by overwriting are dropped too, and that window's
reload only allocates.

A reload runs concurrently with the last call that its first use waits for, and no earlier: that call hides the copy,
and the memory is free until then. Without prefetch, nothing runs concurrently with a window: earlier nodes have ended
on its devices, and later nodes wait for the offload. vLLM's copies on cuda stop the computation of their devices.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field
from typing import assert_never

from prefect_rlhf.placement.augmented.checkpointing import StepRange
from prefect_rlhf.placement.augmented.graph_builder import GraphBuilder
from prefect_rlhf.placement.augmented.node import Dependency, Node
from prefect_rlhf.placement.augmented.priority import just_after, just_before
from prefect_rlhf.placement.augmented.work import (
    Checkpoint,
    Commit,
    Compute,
    Export,
    Follow,
    HostCopy,
    ModelCall,
    Offload,
    Reallocate,
    Reload,
    TrainStep,
    Transfer,
)
from prefect_rlhf.placement.devices.blocks import BlocksByMesh, blocks_of
from prefect_rlhf.placement.devices.mesh import DeviceMesh
from prefect_rlhf.placement.engine_traits import TRAITS
from prefect_rlhf.placement.graph import DataflowGraph
from prefect_rlhf.placement.plan import (
    ExecutionPlan,
    ModelInstance,
    OffloadPart,
    built_version,
    labels,
    moved_parts,
    prefetched,
    trained_instance,
)


def is_overwritten(graph: DataflowGraph, plan: ExecutionPlan, instance: ModelInstance) -> bool:
    """Whether a reallocation writes an offloaded instance before its first use, so that its weights can be dropped.

    This holds for copies of weights that are trained elsewhere, if the instance has no frozen weights.
    """
    trained = trained_instance(graph, plan, instance.role)
    is_copy = trained not in (None, instance) and all(own.trained for own in graph.weights(instance.role))
    return TRAITS[instance.engine].drops_weights and is_copy


def add_offloads(builder: GraphBuilder, graph: DataflowGraph, plan: ExecutionPlan, steps: StepRange) -> None:
    """Insert `reload` and `offload` around the uses of everything that the plan offloads."""
    parts = moved_parts(graph, plan)
    if not parts:
        return
    versions = {instance: built_version(graph, plan, instance, steps.finished) for instance in parts}
    names, early = labels(graph, plan), prefetched(graph, plan)
    overwritten = {instance for instance in parts if is_overwritten(graph, plan, instance)}
    windows = _UseWindows(parts, versions, steps, early, overwritten)
    ordered = builder.ordered()
    for node in ordered:
        windows.visit(node)
    windows.drop_copies()
    late = [instance.mesh for instance in parts if instance not in early]
    blocks = blocks_of([*late, *(mesh for node in ordered for mesh in node.meshes)]) if late else {}
    _chain(builder, ordered, {block for mesh in late for block in blocks[mesh]}, blocks)
    for window in windows.all:
        stops_devices = TRAITS[window.instance.engine].sleeps_on_cuda and plan.cluster.backend == "cuda"
        reload, offload = _insert(builder, window, names, stops_devices)
        if window.instance not in early:
            _keep_apart(builder, ordered, window, reload, offload, blocks)


_Part = tuple[ModelInstance, OffloadPart]


@dataclass(slots=True, eq=False)
class _UseWindow:
    """Consecutive uses of an instance, or of a part of it, in a step."""

    instance: ModelInstance
    part: OffloadPart
    step: int
    number: int
    version: int
    """The weight version at its reload."""
    after: tuple[_UseWindow, ...]
    """Windows on a common device that ended before."""
    newest: int
    """The weight version at its offload."""
    overwrites: bool
    """Whether its first use is a reallocation to the instance, so that its reload makes no copy."""
    written: bool = False
    """Whether its uses write the part."""
    saves: bool = True
    """Whether its offload copies to the host."""
    uses: list[str] = field(default_factory=list)

    def node_id(self, copy: type[HostCopy], name: str) -> str:
        """Return the id of its reload or offload; numbered when the part comes and goes again in a step."""
        part = "" if self.part == "all" else f".{self.part}"
        return f"{copy.kind}.{name}{part}{f'.{self.number}' if self.number > 1 else ''}@{self.step}"

    @property
    def subject(self) -> str:
        """The part that comes and goes, for people."""
        return self.instance.name if self.part == "all" else f"the {self.part} of {self.instance.name}"


class _UseWindows:
    """All windows in the order of their opening; walks the nodes in a topological order."""

    def __init__(
        self,
        parts: Mapping[ModelInstance, tuple[OffloadPart, ...]],
        versions: Mapping[ModelInstance, int],
        steps: StepRange,
        early: Set[ModelInstance],
        overwritten: Set[ModelInstance],
    ) -> None:
        self._parts, self._overwritten = parts, overwritten
        self._steps = steps
        self._early = early
        self.all: list[_UseWindow] = []
        self._versions = dict(versions)
        self._opened: dict[_Part, _UseWindow] = {}
        self._closed: dict[_Part, _UseWindow] = {}  # the latest of each part
        self._count: Counter[tuple[_Part, int]] = Counter()

    def visit(self, node: Node) -> None:
        """Open the windows that a node needs, and close conflicting windows."""
        uses = dict(_uses(node, self._parts, self._steps.finished))
        is_extra = isinstance(node.work, Checkpoint) and self._steps.is_extra(node.step)
        steps = {instance: step for (instance, _), step in uses.items()}
        for part, window in list(self._opened.items()):
            if window.instance in steps and (window.step != steps[window.instance] or is_extra):
                self._close(part)
        for other in [other for other in self._opened if other not in uses]:
            if self._is_in_the_way(other, node, steps.keys()):  # a reallocate needs both its instances at once
                self._close(other)
        for part, step in uses.items():
            if part not in self._opened:
                self._open(part, step, node)
        for part in uses:
            window = self._opened[part]
            window.uses.append(node.id)
            if (version := _written_version(node, window.instance)) is not None:
                window.written, window.newest = True, max(window.newest, version)
                self._versions[window.instance] = version

    def drop_copies(self) -> None:
        """Decide which offloads copy to the host.

        Reallocations bring each version to the overwritten instances. A later step that is not unrolled uses a later
        version, so its window begins with a reallocation.
        """
        following: dict[ModelInstance, _UseWindow] = {}  # an overwritten instance comes and goes as a whole
        for window in reversed(self.all):
            instance = window.instance
            if instance in self._overwritten:
                needed = instance in following and not following[instance].overwrites
                window.saves = window.written and needed
            elif TRAITS[instance.engine].drops_weights:
                window.saves = window.written
            following[instance] = window

    def _is_in_the_way(self, other: _Part, node: Node, used: Set[ModelInstance]) -> bool:
        """Whether a part's window must end before a node: a node of another instance, or any call if the window is
        late.
        """
        mesh = other[0].mesh
        if any(mesh.overlaps(instance.mesh) for instance in used if instance != other[0]):
            return True
        computes = "compute" in node.resources
        return other[0] not in self._early and computes and any(mesh.overlaps(each) for each in node.meshes)

    def _open(self, part: _Part, step: int, first: Node) -> None:
        instance, what = part
        self._count[part, step] += 1
        after = tuple(window for window in self._closed.values() if window.instance.mesh.overlaps(instance.mesh))
        held = _held_version(first, instance)
        number, version, overwrites = self._count[part, step], self._versions[instance] if held is None else held, False
        if TRAITS[instance.engine].drops_weights and isinstance(first.work, Reallocate):
            overwrites = first.work.target == instance and instance in self._overwritten
            version = first.work.reads if overwrites else version
        window = _UseWindow(instance, what, step, number, version, after, version, overwrites)
        self._opened[part] = window
        self.all.append(window)

    def _close(self, part: _Part) -> None:
        window = self._opened.pop(part)
        for earlier in window.after:  # a later window waits for this window, which waited for the earlier window
            key = earlier.instance, earlier.part
            if part[0].mesh.contains(earlier.instance.mesh) and self._closed.get(key) is earlier:
                del self._closed[key]
        self._closed.pop(part, None)  # reinsert at the end: the order is the order of the windows' ends
        self._closed[part] = window


def _uses(
    node: Node, parts: Mapping[ModelInstance, tuple[OffloadPart, ...]], finished: int
) -> Iterator[tuple[_Part, int]]:
    """Yield the offloaded parts that a node uses, each with the step that counts the use.

    A version is read from the instance that trained it while that instance is still on its devices: in the step of
    training, unless the run began with that version.
    """
    match node.work:
        case Compute() | Transfer() | Commit() | HostCopy():
            return
        case Reallocate(source, target, version):
            used = [(source, version if version > finished else node.step), (target, node.step)]
        case Follow(source, target):
            used = [(source, node.step), (target, node.step)]
        case ModelCall() | Checkpoint() | Export():
            used = [(node.work.instance, node.step)]
        case _:
            assert_never(node.work)
    for instance, step in used:
        for part in parts.get(instance, ()):
            if part != "optimizer" or isinstance(node.work, TrainStep | Checkpoint):
                yield (instance, part), step


def _written_version(node: Node, instance: ModelInstance) -> int | None:
    """Return the weight version that a node leaves in an instance, None if it leaves the weights unchanged."""
    match node.work:
        case TrainStep():
            return node.work.writes
        case Reallocate(_, target, version) | Follow(_, target, version) if target == instance:
            return version
    return None


def _held_version(node: Node, instance: ModelInstance) -> int | None:
    """Return the weight version that a node finds in an instance, None if it does not say."""
    match node.work:
        case ModelCall(_, used, version) | Checkpoint(used, version) | Export(used, version) if used == instance:
            return version
        case Follow(_, target, _, held) if target == instance:
            return held
    return None


def _insert(
    builder: GraphBuilder, window: _UseWindow, names: Mapping[ModelInstance, str], stops_devices: bool
) -> tuple[str, str]:
    """Add the window's two nodes around its uses, and return their ids."""
    instance, uses, subject = window.instance, [builder.nodes[use] for use in window.uses], window.subject
    first, last, name = uses[0].id, uses[-1].id, names[instance]
    earlier = [other.node_id(Offload, names[other.instance]) for other in window.after]
    state = "has no device memory" if window.overwrites else "is in host memory"
    dropped = "the next reallocation overwrites it" if window.written else "the host has the same copy"
    reload = Node(
        id=window.node_id(Reload, name),
        step=window.step,
        meshes=(instance.mesh,),
        dependencies=tuple(Dependency(id, "memory", "device memory") for id in earlier),
        reason=f"{first} {'overwrites' if window.overwrites else 'uses'} {subject}, which {state}.",
        work=Reload(instance, window.part, window.version, stops_devices, copies=not window.overwrites),
    )
    offload = Node(
        id=window.node_id(Offload, name),
        step=max(node.step for node in uses),
        meshes=(instance.mesh,),
        dependencies=tuple(Dependency(node.id, "memory", subject) for node in uses),
        reason=f"{last} is the last to use {subject} for now, and the plan offloads it"
        + ("." if window.saves else f": it is dropped, since {dropped}."),
        work=Offload(instance, window.part, window.newest, stops_devices, copies=window.saves),
    )
    # The priorities place the reload just before its first use and the offload just after its last. So the graph's
    # order, which the device locks follow, puts no node of another window between a copy and its uses.
    not_earlier = _not_before(builder, uses[0])
    builder.add(reload, just_before(builder.priority(first), 2))
    builder.wait(reload.id, *(Dependency(id, "memory", "not needed earlier") for id in not_earlier))
    builder.add(offload, just_after(builder.priority(last), 2))
    for node in uses:
        builder.wait(node.id, Dependency(reload.id, "memory", subject))
    return reload.id, offload.id


def _chain(builder: GraphBuilder, ordered: Iterable[Node], late: Set[DeviceMesh], blocks: BlocksByMesh) -> None:
    """Let work on the late blocks run in the order of the graph: windows can then lie between two of them."""
    last: dict[DeviceMesh, str] = {}
    for node in ordered if late else ():
        shared = sorted(late & _blocks_of_node(node, blocks)) if "compute" in node.resources else []
        before = dict.fromkeys(last[block] for block in shared if block in last)
        builder.wait(node.id, *(Dependency(id, "memory", "device memory") for id in before))
        last |= dict.fromkeys(shared, node.id)


def _blocks_of_node(node: Node, blocks: BlocksByMesh) -> set[DeviceMesh]:
    return {block for mesh in node.meshes for block in blocks[mesh]}


def _keep_apart(
    builder: GraphBuilder,
    ordered: Sequence[Node],
    window: _UseWindow,
    reload: str,
    offload: str,
    blocks: BlocksByMesh,
) -> None:
    """Make the reload wait for the preceding computation on each device, and the next computation for the offload."""
    used = set(window.uses)
    uses = [index for index, node in enumerate(ordered) if node.id in used]
    for node in _nearest(reversed(ordered[: uses[0]]), window.instance.mesh, blocks):
        builder.wait(reload, Dependency(node.id, "memory", "device memory"))
    for node in _nearest(ordered[uses[-1] + 1 :], window.instance.mesh, blocks):
        builder.wait(node.id, Dependency(offload, "memory", "device memory"))


def _nearest(nodes: Iterable[Node], mesh: DeviceMesh, blocks: BlocksByMesh) -> Iterator[Node]:
    """Yield the first of the nodes that computes on each device of a mesh."""
    missing = set(blocks[mesh])
    for node in nodes:
        if not missing:
            return
        if "compute" in node.resources and not missing.isdisjoint(there := _blocks_of_node(node, blocks)):
            missing -= there
            yield node


def _not_before(builder: GraphBuilder, first: Node) -> tuple[str, ...]:
    """Return the nodes that must have ended before a reload for `first` may begin.

    They are the dependencies of the last call before `first`. For a reallocate, they are all its dependencies: the
    reloaded weights are overwritten at once, so an earlier reload gains no time.
    """
    if isinstance(first.work, Reallocate):
        return first.depends_on
    calls = _awaited_calls(builder, first)
    return max(calls, key=lambda call: builder.priority(call.id)).depends_on if calls else ()


def _awaited_calls(builder: GraphBuilder, node: Node) -> list[Node]:
    """Return the model function calls that `node` waits for, directly or through moves and computations."""
    calls: list[Node] = []
    visited: set[str] = set()
    pending = list(node.depends_on)
    while pending:
        if (id := pending.pop()) in visited:
            continue
        visited.add(id)
        current = builder.nodes[id]
        if isinstance(current.work, ModelCall):
            calls.append(current)
        else:
            pending += current.depends_on
    return calls
