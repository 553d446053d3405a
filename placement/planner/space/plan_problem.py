"""A graph's planning problem: the choices of the search, and a lower bound on each choice's time.

It leaves out effects that depend on more than two calls (most row transfers, shared copies, the devices of
computations) and uses lower bounds for the rest. So the problem's bound, which holds for any order of nodes, bounds
every plan's augmented graph. The problem `most` proves no bound: it is for finding plans that fit, and counts typical
times.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from itertools import pairwise
from math import prod
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from prefect_rlhf.errors.errors import InvalidInput
from prefect_rlhf.placement.augmented.priority import CallPriorities
from prefect_rlhf.placement.augmented.reallocations import trained_behind
from prefect_rlhf.placement.cost.sizes import ModelSizes
from prefect_rlhf.placement.devices.axes import AXES, WITHIN_NODES
from prefect_rlhf.placement.devices.mesh import DeviceMesh
from prefect_rlhf.placement.graph import Call, DataflowGraph, VersionEdge
from prefect_rlhf.placement.layout.sharing import storage_name
from prefect_rlhf.placement.memory.bytes import usable_bytes
from prefect_rlhf.placement.memory.overhead import GROUP_BYTES, call_overhead, communicator_bytes
from prefect_rlhf.placement.models.engine_constants import BUCKET_BYTES
from prefect_rlhf.placement.plan import ModelInstance, Placement
from prefect_rlhf.placement.planner.question import Question
from prefect_rlhf.placement.planner.space.candidates import (
    Candidate,
    Candidates,
    CostContext,
    fitting_candidates,
    stops_devices,
)
from prefect_rlhf.placement.planner.space.feed_nodes import nodes_before, surely_fed
from prefect_rlhf.placement.planner.space.least_moves import least_move_seconds
from prefect_rlhf.placement.planner.space.visits import visits_after, visits_between
from prefect_rlhf.placement.planner.space.weight_copies import (
    FORBIDDEN,
    readers_of,
    second_reader,
    use_of_copy,
    with_unmoved,
)
from prefect_rlhf.placement.schedule.schedule import STEPS_IN_FLIGHT
from prefect_rlhf.placement.search.problem import (
    MAX_NODES,
    ComputeNode,
    Edge,
    LinkNode,
    Option,
    PairNode,
    Plan,
    PlannedCall,
    Problem,
    ProblemNode,
)

MICROSECONDS = 1e6
OTHER_GROUPS = 1  # communicators of a device next to the running call's, as in most plans that fit
ITERATIONS = 12  # over which the search measures a period

STALE = 2  # the lag of a call whose weights can move only once it has run in the iteration before

MemoryCount = Literal["least", "most"]
"""Bytes that every device holds (for a valid bound), or that the fullest device holds (for plans that fit)."""


@dataclass(frozen=True, slots=True)
class PlanProblem:
    """A search problem, with the candidates that its options stand for."""

    problem: Problem
    candidates: Candidates

    def placements(self, chosen: Plan) -> dict[str, Placement]:
        """Return each call's placement in a plan of the problem."""
        return {
            name: replace(self.candidates[name][choice.option].placement, mesh=self.mesh(choice.mesh))
            for name, choice in chosen.items()
        }

    def mesh(self, index: int) -> DeviceMesh:
        """Return a mesh of the problem."""
        return _parsed(self.problem.meshes[index].label)

    @property
    def num_plans(self) -> int:
        """The number of plans, whether or not they fit in memory."""
        sizes = [len(members) for members in self.problem.mesh_classes]
        return prod(sum(sizes[option.mesh_class] for option in call.options) for call in self.problem.calls)

    def with_memory(self, share: float) -> PlanProblem:
        """Return the problem with a share of the devices' memory."""
        device_bytes = tuple(int(size * share) for size in self.problem.device_bytes)
        return replace(self, problem=replace(self.problem, device_bytes=device_bytes))


@lru_cache(maxsize=1 << 15)  # the meshes of a large cluster, which every ranking of neighbours asks for
def _parsed(name: str) -> DeviceMesh:
    return DeviceMesh.parse(name)


@dataclass(frozen=True)  # without slots, since it keeps its problems
class PlanSpace:
    """All plans for a question: the candidates of every model call, and the search problems made of them."""

    context: CostContext
    candidates: Candidates

    @classmethod
    def of(cls, question: Question, also: Iterable[DeviceMesh] = ()) -> PlanSpace:
        """Return all plans for a question, on meshes of its space and `also`.

        Raises InvalidInput if no mesh can run a call.
        """
        context = CostContext.of(question, also=also)
        calls = (call for call in context.graph if call.kind != "compute")
        return cls(context, {call.name: fitting_candidates(call, context) for call in calls})

    @property
    def left_out(self) -> str:
        """Parts of plan files that the search does not consider, in words; the bound holds for the rest."""
        several_nodes = self.context.site.mesh.num_nodes > 1
        parts = (
            "numbers of micro-batches between powers of two, and sizes of vLLM's cache between those tried",
            "orders of a trained model's devices",
            "parts of a plan that would not fit without them",
            *(f"{AXES[axis].title} across nodes" for axis in WITHIN_NODES if several_nodes),
            self.context.space.left_out,
        )
        return "; ".join(part for part in parts if part)

    @cached_property
    def least(self) -> PlanProblem:
        """The problem that counts only bytes that every device holds, so its bound is valid."""
        return plan_problem(self.context, self.candidates)

    @cached_property
    def with_copies(self) -> PlanProblem | None:
        """`least` with two options for each second reader of trained weights; None without a second reader.

        With the first option it has its own copy, with the second it uses the first reader's.
        """
        return self._with_copies(computations=False)

    @cached_property
    def computed(self) -> PlanProblem:
        """`least` with a node for each computation, to compute bounds.

        As nodes, computations lead a search for plans to slower plans (`docs/internals/measured_log.md`).
        """
        return plan_problem(self.context, self.candidates, computations=True)

    @cached_property
    def computed_with_copies(self) -> PlanProblem:
        """`with_copies`, or `least` without a second reader, with a node for each computation, to compute bounds."""
        return self._with_copies(computations=True) or self.computed

    def _with_copies(self, computations: bool) -> PlanProblem | None:
        chooses = [name for name in self.candidates if second_reader(self.context.graph, name)]
        if not chooses:
            return None
        twice = {name: options * 2 if name in chooses else options for name, options in self.candidates.items()}
        return plan_problem(self.context, twice, copies=True, computations=computations)

    @cached_property
    def most(self) -> PlanProblem:
        """The problem that counts the fullest device's bytes: most of its plans fit, with or without prefetch."""
        return plan_problem(self.context, self.candidates, "most")


def restricted_problem(
    space: PlanSpace, meshes: Mapping[str, DeviceMesh], admits: Callable[[Call, Placement], bool]
) -> PlanProblem:
    """Return a preset's problem: `most`, with one mesh for each call, and only ways to run there that the preset
    allows.

    Raises InvalidInput if a call does not fit its mesh.
    """
    context, mesh_space = space.context, space.context.space
    index = {name: mesh_space.places[mesh][0] for name, mesh in meshes.items()}
    classes = tuple((mesh,) for mesh in dict.fromkeys(index.values()))
    admitted: dict[str, tuple[Candidate, ...]] = {}
    for name, options in space.candidates.items():
        call, mesh, of_mesh = context.graph.call(name), index[name], mesh_space.class_of(meshes[name])
        admitted[name] = tuple(
            replace(option, mesh_class=classes.index((mesh,)))
            for option in options
            if option.mesh_class == of_mesh and admits(call, option.placement)
        )
        if not admitted[name]:
            raise InvalidInput(f"calls.{name}", meshes[name].name, "a mesh that can run it and has the memory")
    return plan_problem(context, admitted, "most", classes)


def plan_problem(
    context: CostContext,
    candidates: Candidates,
    counted: MemoryCount = "least",
    classes: tuple[tuple[int, ...], ...] | None = None,
    copies: bool = False,
    computations: bool = False,
) -> PlanProblem:
    """Return the problem of the context's graph; `classes` of meshes replace those of its space.

    With `copies`, the second half of a second reader's options uses the first reader's copy. With `computations`, each
    computation that a call waits for is a node, and visits keep their order: both lead a search to slower plans.
    """
    graph, space = context.graph, context.space
    reserve = 0
    if counted == "most":  # staged weights, and collectives of other calls, which a call's own count leaves out
        reserve = 2 * BUCKET_BYTES + (OTHER_GROUPS * GROUP_BYTES if context.site.backend == "cuda" else 0)
    behind = _behind(graph, list(candidates))
    names = [call.name for call in graph if computations or call.name in candidates]
    nodes = tuple(
        node
        for name in _in_order(names, behind)
        for node in _nodes(graph.call(name), candidates, context, counted, copies)
    )
    if len(nodes) > MAX_NODES:  # a bound holds without computations, too
        nodes = tuple(node for node in nodes if not isinstance(node, ComputeNode))
    edges = list(_edges(graph, {node.name for node in nodes}))
    problem = Problem(
        name=graph.name,
        device_bytes=tuple(
            usable_bytes(context.site.cluster.memory_bytes(node), context.site.backend) - reserve
            for node in space.nodes
        ),
        meshes=space.intervals,
        mesh_classes=space.classes if classes is None else classes,
        nodes=nodes,
        edges=tuple(_with_later_runs(edges, set(behind))),
        iterations=ITERATIONS,
        in_flight=STEPS_IN_FLIGHT,
        between=visits_between(graph, candidates, edges, any_reader=not computations),
        visits_after=visits_after(graph, candidates, edges, behind) if computations else {},
        counts_orders=computations,
    )
    return PlanProblem(problem, candidates)


def _nodes(
    call: Call, candidates: Candidates, context: CostContext, counted: MemoryCount, copies: bool
) -> Iterator[ProblemNode]:
    """The call, and the moves around it; a computation only if a call waits for it."""
    graph, started = context.graph, context.site.sources.orchestration_seconds
    if call.kind == "compute":
        compute = ComputeNode(call.name, _microseconds(started + (call.host_seconds or 0.0)))
        yield from (compute,) if compute.microseconds and _feeds_calls(graph, call) else ()
        return
    options = candidates[call.name]
    visits = [option.surely_comes or counted == "most" for option in options]
    stopping = [
        visit and option.placement.offload == "all" and stops_devices(option.placement, context)
        for visit, option in zip(visits, options, strict=True)
    ]
    occupied: Literal["compute", "host_link"] = "compute" if any(stopping) else "host_link"
    counts = [visit and stops == any(stopping) for visit, stops in zip(visits, stopping, strict=True)]
    reload_us, offload_us = (
        tuple(_microseconds(each) if count else 0 for each, count in zip(seconds, counts, strict=True))
        for seconds in ([o.reload_seconds for o in options], [o.offload_seconds for o in options])
    )
    if any(reload_us):
        yield LinkNode(_reload(call.name), call.name, reload_us, occupied)
    moves = list(_moves(call, candidates, context, copies))
    late = bool(moves) and _lag(graph, call) == STALE
    yield from () if late else moves
    yield PlannedCall(
        call.name, call.role, call.kind, tuple(_option(call, option, context, counted) for option in options)
    )
    if any(offload_us):
        yield LinkNode(_offload(call.name), call.name, offload_us, occupied)
    yield from moves if late else ()


def _moves(call: Call, candidates: Candidates, context: CostContext, copies: bool) -> Iterator[PairNode]:
    """The move of trained weights to their first reader, and with `copies` to the second, if it has its own.

    Without, others may use the copy of the first: it is not certain that they do.
    """
    graph, options = context.graph, candidates[call.name]
    trainer, first = graph.trained_by(call.role or ""), next(iter(readers_of(graph, call)), None)
    if trainer is None or first is None:
        return
    if call == first:
        yield _reallocation(call, candidates[trainer.name], options, trainer, context)
    elif copies and second_reader(graph, call.name):
        own = options[: len(options) // 2]
        move = _reallocation(call, candidates[trainer.name], own, trainer, context)
        yield with_unmoved(move)
        yield use_of_copy(first, candidates[first.name], call, own)


def _option(call: Call, candidate: Candidate, context: CostContext, counted: MemoryCount) -> Option:
    placement = candidate.placement
    copy = _copy_name(call, placement, context)
    fed = nodes_before(call, context.graph) if counted == "most" else int(surely_fed(call, candidate, context.graph))
    held, fullest, seconds = candidate.most, candidate.most.peak, candidate.seconds
    if counted == "least":
        held, fullest, seconds = candidate.least, candidate.fullest_bytes, seconds - candidate.spared_seconds
    seconds_us = max(1, _microseconds(seconds + fed * context.site.sources.orchestration_seconds))
    bytes_then = held.static, held.peak, copy, fullest, candidate.loaded_bytes
    return Option(placement.strategy, candidate.mesh_class, seconds_us, *bytes_then)


def _copy_name(call: Call, placement: Placement, context: CostContext) -> str:
    """Name the copy of weights that a call uses: calls on equal meshes with the same name share some bytes of it."""
    return f"{storage_name(context.graph, call, placement)} {placement.strategy} {placement.offload == 'all'}"


def _reallocation(
    call: Call, trained: Sequence[Candidate], readers: Sequence[Candidate], trainer: Call, context: CostContext
) -> PairNode:
    """The move of weights from a train_step to a call, at its least; no move on equal meshes if both use the same copy.

    Both copies are on their devices during the move: if a device would need both and has less memory, the move is
    forbidden. Copies that share a base need at least the larger of both.
    """
    known = context.moves.get(call.name)
    if known is not None and known[0] == trained and known[1] == readers:
        return known[2]
    node = _new_reallocation(call, trained, readers, trainer, context)
    context.moves.setdefault(call.name, (trained, readers, node))
    return node


def _new_reallocation(
    call: Call, trained: Sequence[Candidate], readers: Sequence[Candidate], trainer: Call, context: CostContext
) -> PairNode:
    (trained, trained_kinds), (readers, reader_kinds) = _moved_alike(trained), _moved_alike(readers)
    sizes = ModelSizes.of(context.graph.model(call.role or ""))
    sources, role = context.site.sources, call.role or ""
    taken = [
        sources.taken_seconds(ModelInstance(role, p.engine, p.mesh, p.strategy), sizes)
        for p in (option.placement for option in readers)
    ]
    seconds = least_move_seconds(trained, readers, sizes, sources) + sources.orchestration_seconds + taken
    seconds = np.maximum(seconds, 1 / MICROSECONDS)  # only an absent move takes no time
    numbers: dict[object, int] = {}
    trained_copy, read_copy = (
        [numbers.setdefault((o.placement.engine, o.placement.strategy), len(numbers)) for o in options]
        for options in (trained, readers)
    )
    seconds[2][np.equal.outer(trained_copy, read_copy)] = 0.0
    microseconds = np.floor(seconds * MICROSECONDS).astype(np.int64)
    model, backend = context.graph.model(call.role or ""), context.site.backend
    sent = [o.copy_bytes + call_overhead(trainer, o.placement, model, backend)[1] for o in trained]
    read = [option.copy_bytes for option in readers]
    copies = np.add.outer(sent, read)
    names = [
        [_copy_name(c, o.placement, context) for o in options] for c, options in ((trainer, trained), (call, readers))
    ]
    on_equal = np.where(np.equal.outer(*map(np.array, names)), np.maximum.outer(sent, read), copies)
    rooms = {mesh: _room_for_copies(mesh, context) for mesh in {option.placement.mesh for option in readers}}
    room = np.array([rooms[option.placement.mesh] for option in readers])
    microseconds[1][copies > room] = FORBIDDEN
    microseconds[2][(on_equal > room) & (microseconds[2] > 0)] = FORBIDDEN
    return PairNode(_move(call.name), trainer.name, call.name, "both", microseconds, (trained_kinds, reader_kinds))


def _moved_alike(options: Sequence[Candidate]) -> tuple[list[Candidate], NDArray[np.int64]]:
    """An option of each kind that moves alike, and the kind of each option: cuts, for example, change no move."""
    numbers: dict[object, int] = {}
    keys = [
        (o.mesh_class, o.placement.engine, o.placement.strategy, o.placement.offload == "all", o.copy_bytes)
        for o in options
    ]
    kinds = np.array([numbers.setdefault(key, len(numbers)) for key in keys], dtype=np.int64)
    _, first = np.unique(kinds, return_index=True)
    return [options[index] for index in first], kinds


def _room_for_copies(mesh: DeviceMesh, context: CostContext) -> int:
    """Memory on the mesh's largest device while it receives weights, without the move's own collectives."""
    nodes = range(mesh.first_node, mesh.first_node + mesh.num_nodes)
    between = communicator_bytes(mesh.num_devices) if context.site.backend == "cuda" else 0
    return usable_bytes(max(context.site.cluster.memory_bytes(node) for node in nodes), context.site.backend) - between


def _edges(graph: DataflowGraph, names: set[str]) -> Iterator[Edge]:
    """Waits between calls, through computations and the moves around calls."""
    for call in graph:
        if call.kind == "compute":
            if call.name in names:
                yield from (Edge(producer, call.name) for producer in sorted(_producers(graph, call, names)))
            continue
        early = _move(call.name) in names and _lag(graph, call) >= STALE
        move = [] if early else [_move(call.name)]
        around = [_reload(call.name), *move, call.name, _offload(call.name)]  # in their order
        yield from (Edge(first, second) for first, second in pairwise(name for name in around if name in names))
        yield from (Edge(producer, call.name) for producer in sorted(_producers(graph, call, names)))
        if {_offload(call.name), _reload(call.name)} <= names:
            yield Edge(_offload(call.name), _reload(call.name), 1)
    for edge in graph.version_edges():
        if graph.call(edge.target).kind == "compute":
            continue
        if _move(edge.target) in names:
            yield from _around_move(edge, _move(edge.target))
        else:
            yield Edge(edge.source, edge.target, edge.lag)


def _behind(graph: DataflowGraph, names: Sequence[str]) -> dict[str, str]:
    """The train_steps that let the first weights of the next step pass, each with the call that these are for.

    In the problem such a train_step belongs to the next iteration, behind that call. `names` are all model calls.
    """
    priorities, behind = CallPriorities.of(graph), dict[str, str]()
    for first, second in trained_behind(graph, priorities):
        reader = next(name for name in names if graph.call(name).role == first.role and priorities.levels[name] == 0)
        users = [name for name in names if graph.call(name).role == second.role]
        reads = any(second.name in _producers(graph, graph.call(name)) for name in names)
        if names.index(reader) < names.index(users[0]) and not reads:
            behind.setdefault(second.name, reader)
    return behind


def _in_order(names: Sequence[str], behind: Mapping[str, str]) -> Iterator[str]:
    """The calls in the order of their nodes."""
    for name in names:
        if name not in behind:
            yield name
            yield from (other for other, reader in behind.items() if reader == name)


def _with_later_runs(edges: Iterable[Edge], later: Set[str]) -> Iterator[Edge]:
    """The edges if the runs of some calls, with their offloads and reloads, belong to the next iteration."""
    moved = {node for call in later for node in (_reload(call), call, _offload(call))}
    for edge in edges:
        yield replace(edge, lag=edge.lag + (edge.target in moved) - (edge.source in moved))


def _around_move(edge: VersionEdge, move: str) -> Iterator[Edge]:
    """Dependencies of a move, and of the train_step on the readers of the version that it overwrites.

    A copy of stale weights is made as soon as the weights exist and the call that used the previous weights has run:
    `early` iterations before the call. Without a move the call itself reads the version that the train_step overwrites.
    """
    early = max(0, edge.lag - 1)
    yield Edge(edge.source, move, edge.lag - early)
    yield Edge(move, edge.target, early)
    if early <= 1:  # else it waits for a call of a later iteration
        yield Edge(edge.target, move, 1 - early)
    yield Edge(move, edge.source, 1 - edge.lag + early)
    if edge.lag - 1 < STEPS_IN_FLIGHT:
        yield Edge(edge.target, edge.source, 1 - edge.lag, without=move)


def _lag(graph: DataflowGraph, call: Call) -> int:
    """Steps from the train_step that wrote the weights of a call to the call."""
    return next(edge.lag for edge in graph.version_edges() if edge.target == call.name)


def _producers(graph: DataflowGraph, call: Call, computations: Set[str] = frozenset()) -> set[str]:
    """The calls with models whose rows it waits for, and `computations`, through other computations."""
    producers: set[str] = set()
    for name in graph.reads_of(call.name):
        producer, counts = graph.call(name), name in computations
        producers |= {name} if counts or producer.kind != "compute" else _producers(graph, producer, computations)
    return producers


def _feeds_calls(graph: DataflowGraph, compute: Call) -> bool:
    """Whether a call with a model waits for a computation, directly or through others."""
    readers = (call for call in graph if compute.name in graph.reads_of(call.name))
    return any(call.kind != "compute" or _feeds_calls(graph, call) for call in readers)


def _move(call: str) -> str:
    return f"reallocate {call}"


def _reload(call: str) -> str:
    return f"reload {call}"


def _offload(call: str) -> str:
    return f"offload {call}"


def _microseconds(seconds: float) -> int:
    """Rounded down: a bound must not exceed the bounded value."""
    return int(seconds * MICROSECONDS)
