"""A planning problem as a value: the options of each call with their costs, moves between calls, dependencies.

Closed problem files and traced graphs with a cost model are both converted to a problem; it is the only input of
searches. Devices stand on a line and every mesh is an interval of it. Everything else relies on two consequences.
Meshes that overlap pairwise have a device in common (Helly). Times and memory depend only on each call's option and on
the pairs of meshes that overlap, not on the positions of the meshes.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

import numpy as np

from prefect_rlhf.errors.errors import InvalidInput
from prefect_rlhf.placement.devices.strategy import Strategy
from prefect_rlhf.placement.search.compiled import Ints

MAX_CALLS = 16
MAX_NODES = 62  # a set of nodes is a 64-bit word in the compiled part
Occupies = Literal["first", "second", "both"]


@dataclass(frozen=True, slots=True, order=True)
class Interval:
    """Devices `start` to `stop - 1` of the line, under the name that the plan shows.

    >>> Interval(0, 4, "a").overlaps(Interval(3, 5, "b")), Interval(0, 4, "a").overlaps(Interval(4, 8, "c"))
    (True, False)
    """

    start: int
    stop: int
    label: str

    @property
    def num_devices(self) -> int:
        return self.stop - self.start

    def overlaps(self, other: Interval) -> bool:
        return self.start < other.stop and other.start < self.stop


@dataclass(frozen=True, slots=True)
class Option:
    """A way to run a call: a strategy on any mesh of a class."""

    strategy: Strategy
    mesh_class: int
    """An index into the problem's classes."""
    microseconds: int
    static_bytes: int
    """What every device of the mesh always holds."""
    peak_bytes: int
    """What it holds while the call runs: `static_bytes` or more."""
    copy: str | None = None
    """Calls with options that name the same copy share its static bytes if their meshes are equal."""
    fullest_bytes: int = 0
    """What some device then holds, if that is more than `peak_bytes`."""
    loaded_bytes: int = 0
    """What every device holds while a link node of the call runs, if that is more than `static_bytes`."""


@dataclass(frozen=True, slots=True)
class PlannedCall:
    """A call to be placed; it occupies the devices of its mesh."""

    name: str
    role: str | None
    kind: str
    options: tuple[Option, ...]


@dataclass(frozen=True, slots=True, eq=False)  # holds an array
class PairNode:
    """A move between the meshes of two calls: a reallocation of weights, a transfer of rows.

    `microseconds[option of first, option of second]`; if the relation of the meshes matters, with a leading axis of
    three: disjoint, overlapping but not equal, equal. If the entry is 0, the node is absent.

    `kinds` groups the options of the first and of the second call, because many options have the same moves; the axes
    are then kinds instead of options. Every kind has an option.
    """

    name: str
    first: str
    second: str
    occupies: Occupies
    microseconds: Ints
    kinds: tuple[Ints, Ints] | None = None

    @property
    def by_option(self) -> Ints:
        """`microseconds` with an entry for each option of the first call and of the second."""
        if self.kinds is None:
            return self.microseconds
        first, second = self.kinds
        return self.microseconds.take(first, axis=-2).take(second, axis=-1)


@dataclass(frozen=True, slots=True)
class LinkNode:
    """An offload or reload. It occupies the host link of a call's mesh, or its compute, and is absent if it takes 0.

    A call's model *visits* its devices during the call and its present link nodes. Meanwhile no visiting call of
    another role or copy, and no link node of such a call, runs on overlapping meshes. A visit also excludes each call
    of another copy that leaves no room for its `loaded_bytes`. In that case it is late if no other call that visits its
    devices may lie between the two; a late visit's link nodes also occupy their devices' compute.
    """

    name: str
    call: str
    microseconds: tuple[int, ...]
    occupies: Literal["host_link", "compute"] = "host_link"


@dataclass(frozen=True, slots=True)
class ComputeNode:
    """A computation on rows. It may run on any device, so it occupies no device of the problem.

    Its runs in different iterations follow each other.
    """

    name: str
    microseconds: int


ProblemNode = PlannedCall | PairNode | LinkNode | ComputeNode


def calls_of(node: ProblemNode) -> tuple[str, ...]:
    """The names of a node's calls: two for a pair node, no name for a computation, otherwise a single name."""
    if isinstance(node, ComputeNode):
        return ()
    if isinstance(node, PairNode):
        return node.first, node.second
    return (node.name,) if isinstance(node, PlannedCall) else (node.call,)


@dataclass(frozen=True, slots=True)
class Edge:
    """A dependency, also through absent nodes: `source` in iteration i ends before `target` in iteration i + lag
    starts.

    With `without`, it applies only to plans in which the move of that name takes no time; the lag may then be negative.
    Bounds ignore it.
    """

    source: str
    target: str
    lag: int = 0
    without: str | None = None


@dataclass(frozen=True, slots=True, eq=False)  # its pair nodes hold arrays
class Problem:
    """A search problem: nodes, edges, meshes and memory.

    A mesh class is a set of meshes with the same size and the same costs for every option. With equal nodes each size
    is a class; with two kinds of nodes, each size and kind. A preset restricts a call to fewer classes.
    """

    name: str
    device_bytes: tuple[int, ...]
    """The memory of each device of the line."""
    meshes: tuple[Interval, ...]
    mesh_classes: tuple[tuple[int, ...], ...]
    """Each is a set of indices into `meshes`."""
    nodes: tuple[ProblemNode, ...]
    """In a topological order of the edges of lag 0: a run's order, which its locks follow, or a file's order. Ties go
    to the earlier node."""
    edges: tuple[Edge, ...]
    iterations: int
    """Over how many a plan is timed."""
    in_flight: int = 4
    """How many of them run at once, at most."""
    between: Mapping[tuple[str, str], frozenset[str]] = field(default_factory=dict)
    """For a call and a visitor that must not run at the same time, the calls that may visit after the visitor and
    before the call's next run; without an entry any call may."""
    visits_after: Mapping[tuple[str, str], int] = field(default_factory=dict)
    """If two calls' visits, or a call and a visit, must not run at the same time: by how many iterations the first call
    of a pair is earlier than the second, which it precedes."""
    counts_orders: bool = False
    """Whether bounds count both orders of a train_step and a call on common devices, and take the lesser."""

    def __post_init__(self) -> None:
        check_problem(self)

    @property
    def calls(self) -> tuple[PlannedCall, ...]:
        return tuple(node for node in self.nodes if isinstance(node, PlannedCall))

    @property
    def num_devices(self) -> int:
        return len(self.device_bytes)


@dataclass(frozen=True, slots=True)
class Choice:
    """The indices of the option and the mesh that a plan chooses for a call."""

    option: int
    mesh: int


Plan = Mapping[str, Choice]


def check_problem(problem: Problem) -> None:
    """Raise InvalidInput for a malformed problem."""
    _check_sizes(problem)
    _check_meshes(problem)
    num_options = {call.name: len(call.options) for call in problem.calls}
    for node in problem.nodes:
        if isinstance(node, PlannedCall):
            _check_options(problem, node)
        else:
            _check_durations(node, num_options)
    _check_edges(problem)


def _check_sizes(problem: Problem) -> None:
    if problem.iterations < 1:
        raise InvalidInput("iterations", problem.iterations, "1 or more")
    if not 1 <= len(problem.calls) <= MAX_CALLS:
        raise InvalidInput("calls", len(problem.calls), f"1 to {MAX_CALLS} calls")
    if len(problem.nodes) > MAX_NODES:
        raise InvalidInput("nodes", len(problem.nodes), f"at most {MAX_NODES} calls and moves in an iteration")
    ((name, count),) = Counter(node.name for node in problem.nodes).most_common(1)
    if count > 1:
        raise InvalidInput("nodes", name, "a different name for each call and move")


def _check_meshes(problem: Problem) -> None:
    for mesh in problem.meshes:
        if not 0 <= mesh.start < mesh.stop <= problem.num_devices:
            raise InvalidInput(f"mesh {mesh.label}", (mesh.start, mesh.stop), f"devices 0 to {problem.num_devices - 1}")
    for index, members in enumerate(problem.mesh_classes):
        sizes = {problem.meshes[mesh].num_devices for mesh in members}
        if len(sizes) != 1:
            raise InvalidInput(f"mesh_classes[{index}]", sorted(sizes), "at least 1 mesh, all of the same size")


def _check_durations(node: PairNode | LinkNode | ComputeNode, num_options: Mapping[str, int]) -> None:
    names = calls_of(node)
    for name in names:
        if name not in num_options:
            raise InvalidInput(f"node {node.name}", name, f"a call: {', '.join(num_options)}")
    shape = tuple(num_options[name] for name in names)
    if isinstance(node, PairNode) and node.kinds is not None:
        if tuple(map(len, node.kinds)) != shape:
            raise InvalidInput(f"node {node.name}", tuple(map(len, node.kinds)), f"kinds of {shape} options")
        shape = tuple(len(np.unique(kinds)) for kinds in node.kinds)
    durations = np.asarray(node.microseconds)
    if durations.shape not in (shape, (3, *shape)) or durations.min() < 0:
        raise InvalidInput(f"node {node.name}", durations.shape, f"durations of 0 or more with shape {shape}")


def _check_options(problem: Problem, call: PlannedCall) -> None:
    if not call.options:
        raise InvalidInput(f"call {call.name}", 0, "at least one option")
    for index, option in enumerate(call.options):
        where = f"call {call.name}: option {index}"
        if not 0 <= option.mesh_class < len(problem.mesh_classes):
            raise InvalidInput(where, option.mesh_class, f"a mesh class below {len(problem.mesh_classes)}")
        if option.microseconds < 1:
            raise InvalidInput(where, option.microseconds, "a duration of at least 1 microsecond")
        if not 0 <= option.static_bytes <= option.peak_bytes:
            raise InvalidInput(where, (option.static_bytes, option.peak_bytes), "0 <= static bytes <= peak bytes")


def _check_edges(problem: Problem) -> None:
    position = {node.name: index for index, node in enumerate(problem.nodes)}
    for edge in problem.edges:
        for name in (edge.source, edge.target, edge.without or edge.source):
            if name not in position:
                raise InvalidInput("edges", name, "the name of a call or move")
        is_back = edge.lag == 0 and position[edge.source] >= position[edge.target]
        if is_back or not (edge.lag >= 0 if edge.without is None else -problem.in_flight < edge.lag):
            raise InvalidInput("edges", f"{edge.source} -> {edge.target}", "an edge to a later node, or a positive lag")
