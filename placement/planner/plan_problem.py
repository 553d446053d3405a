"""The planning problem of a graph: what the search may choose, and the least that each choice must take.

It leaves out what depends on more than two calls (transfers of rows, copies that several calls share, computations) and
counts the rest at the least it can take. So no plan's augmented graph takes less than the problem says.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from prefect_rlhf.placement.cost.sizes import ModelSizes
from prefect_rlhf.placement.engine_constants import BUCKET_BYTES
from prefect_rlhf.placement.errors import InvalidInput
from prefect_rlhf.placement.graph import Call, DataflowGraph
from prefect_rlhf.placement.memory.bytes import usable_bytes
from prefect_rlhf.placement.mesh import DeviceMesh
from prefect_rlhf.placement.plan import Placement
from prefect_rlhf.placement.planner.candidates import Candidate, CostContext, candidates
from prefect_rlhf.placement.planner.least_moves import least_move_seconds
from prefect_rlhf.placement.search.problem import (
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


MemoryCount = Literal["least", "most"]
"""Bytes that every device holds (for a bound that is true), or the fullest one (for plans that fit)."""


@dataclass(frozen=True, slots=True)
class PlanProblem:
    """A problem with what its options stand for."""

    problem: Problem
    candidates: Mapping[str, tuple[Candidate, ...]]

    def placements(self, chosen: Plan) -> dict[str, Placement]:
        """What a plan of the problem says of each call."""
        return {
            name: replace(
                self.candidates[name][choice.option].placement,
                mesh=DeviceMesh.parse(self.problem.meshes[choice.mesh].label),
            )
            for name, choice in chosen.items()
        }


def all_candidates(setting: CostContext) -> dict[str, tuple[Candidate, ...]]:
    """Of every call with a model. Raises InvalidInput where a call can run nowhere."""
    return {call.name: candidates(call, setting) for call in setting.graph if call.kind != "compute"}


def plan_problem(
    setting: CostContext, found: Mapping[str, tuple[Candidate, ...]], iterations: int, counted: MemoryCount = "least"
) -> PlanProblem:
    """Of the setting's graph, which has no evaluation calls; `found` are its calls' candidates.

    Where bytes are counted at the most, nothing is offloaded: it may be on its way whenever memory is short.
    """
    return _posed(setting, found if counted == "least" else _staying(found), iterations, counted, setting.line.classes)


def restricted_problem(
    setting: CostContext,
    found: Mapping[str, tuple[Candidate, ...]],
    iterations: int,
    meshes: Mapping[str, DeviceMesh],
    admits: Callable[[Call, Placement], bool],
) -> PlanProblem:
    """The same with a mesh for each call, as a preset gives it, and of the ways to run there those that it admits.

    Raises InvalidInput where a call does not fit its mesh.
    """
    line = setting.line
    index = {name: line.meshes.index(mesh) for name, mesh in meshes.items()}
    classes = tuple((mesh,) for mesh in dict.fromkeys(index.values()))
    kept = {}
    for name, every in _staying(found).items():
        own = classes.index((index[name],))
        here = [
            one
            for one in every
            if index[name] in line.classes[one.mesh_class] and admits(setting.graph.call(name), one.placement)
        ]
        kept[name] = tuple(replace(one, mesh_class=own) for one in here)
        if not kept[name]:
            raise InvalidInput(f"calls.{name}", meshes[name].name, "a mesh that divides its work and on which it fits")
    return _posed(setting, kept, iterations, "most", classes)


def _staying(found: Mapping[str, tuple[Candidate, ...]]) -> dict[str, tuple[Candidate, ...]]:
    """Those that are never offloaded."""
    return {name: tuple(one for one in every if one.placement.offload == "none") for name, every in found.items()}


def _posed(
    setting: CostContext,
    found: Mapping[str, tuple[Candidate, ...]],
    iterations: int,
    counted: MemoryCount,
    classes: tuple[tuple[int, ...], ...],
) -> PlanProblem:
    graph, line = setting.graph, setting.line
    reserve = 0 if counted == "least" else 2 * BUCKET_BYTES
    nodes = tuple(node for name in found for node in _nodes(graph.call(name), found, setting, counted))
    problem = Problem(
        name=graph.name,
        device_bytes=tuple(usable_bytes(setting.cluster.memory_bytes(node)) - reserve for node in line.nodes),
        meshes=line.intervals,
        mesh_classes=classes,
        nodes=nodes,
        edges=tuple(_edges(graph, {node.name for node in nodes})),
        iterations=iterations,
    )
    return PlanProblem(problem, found)


def _nodes(
    call: Call, found: Mapping[str, tuple[Candidate, ...]], setting: CostContext, counted: MemoryCount
) -> Iterator[ProblemNode]:
    """The call, and the moves around it."""
    own = found[call.name]
    trainer = _moved_from(setting.graph, call)
    if trainer is not None:
        yield _reallocation(call, found[trainer.name], own, trainer, setting)
    away = tuple(_microseconds(one.host_seconds) for one in own)
    comes_and_goes = any(away) and _alone(setting.graph, call)
    if comes_and_goes:
        yield LinkNode(_reload(call.name), call.name, away)
    yield PlannedCall(call.name, call.role, call.kind, tuple(_option(call, one, counted) for one in own))
    if comes_and_goes:
        yield LinkNode(_offload(call.name), call.name, away)


def _option(call: Call, one: Candidate, counted: MemoryCount) -> Option:
    placement = one.placement
    copy = f"{call.role} {placement.engine} {placement.strategy} {placement.offload == 'all'}"
    least = max(1, _microseconds(one.seconds))
    held = one.least if counted == "least" else one.most
    return Option(placement.strategy, one.mesh_class, least, held.static, held.peak, copy, one.most.peak)


def _moved_from(graph: DataflowGraph, call: Call) -> Call | None:
    """The train_step that makes the weights this call reads, where it is the first of its role to read them.

    Others may use the same copy, so a move of their own is not certain.
    """
    trainer = graph.trained_by(call.role or "")
    readers = [other for other in graph if other.role == call.role and other != trainer]
    return trainer if readers and call == readers[0] else None


def _alone(graph: DataflowGraph, call: Call) -> bool:
    """Whether no other call may use its copy of the weights, which then would come and go once for both."""
    return sum(other.role == call.role for other in graph) == 1


def _reallocation(
    call: Call, trained: Sequence[Candidate], own: Sequence[Candidate], trainer: Call, setting: CostContext
) -> PairNode:
    sizes = ModelSizes.of(setting.graph.model(call.role or ""))
    seconds = least_move_seconds(trained, own, sizes, setting.sources)
    seconds[2][_one_copy(trained, own)] = 0.0
    microseconds = np.floor(seconds * MICROSECONDS).astype(np.int64)
    return PairNode(_move(call.name), trainer.name, call.name, "both", microseconds)


def _one_copy(trained: Sequence[Candidate], readers: Sequence[Candidate]) -> NDArray[np.bool_]:
    """[trained, readers]: whether, on equal meshes, both use one copy of the weights."""
    numbers: dict[object, int] = {}
    a, b = (
        np.array([numbers.setdefault((one.placement.engine, one.placement.strategy), len(numbers)) for one in every])
        for every in (trained, readers)
    )
    same: NDArray[np.bool_] = np.equal.outer(a, b)
    return same


def _edges(graph: DataflowGraph, names: set[str]) -> Iterator[Edge]:
    """Waits between calls, through computations and the moves around calls."""
    for call in graph:
        if call.kind == "compute":
            continue
        first = _first_of(call.name, names)
        yield from (Edge(a, b) for a, b in zip(_around(call.name, names), _around(call.name, names)[1:], strict=False))
        for producer in sorted(_producers(graph, call)):
            yield Edge(producer, call.name)
        if _offload(call.name) in names:
            yield Edge(_offload(call.name), first, 1)
    for edge in graph.version_edges():
        if graph.call(edge.target).kind == "compute":
            continue
        if _move(edge.target) in names:
            yield Edge(edge.source, _move(edge.target), edge.lag)
            yield Edge(edge.target, _move(edge.target), 1)
        else:
            yield Edge(edge.source, edge.target, edge.lag)


def _around(name: str, names: set[str]) -> list[str]:
    """The call and the moves around it, in their order."""
    return [one for one in (_move(name), _reload(name), name, _offload(name)) if one in names]


def _first_of(name: str, names: set[str]) -> str:
    return next(one for one in (_reload(name), name) if one in names)


def _producers(graph: DataflowGraph, call: Call) -> set[str]:
    """The calls with models whose rows it waits for, through computations."""
    found: set[str] = set()
    for name in graph.reads_of(call.name):
        producer = graph.call(name)
        found |= _producers(graph, producer) if producer.kind == "compute" else {name}
    return found


def _move(call: str) -> str:
    return f"reallocate {call}"


def _reload(call: str) -> str:
    return f"reload {call}"


def _offload(call: str) -> str:
    return f"offload {call}"


def _microseconds(seconds: float) -> int:
    """Rounded down: a bound must not be above what it bounds."""
    return int(seconds * MICROSECONDS)
