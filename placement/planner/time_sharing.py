"""Plans in which every model leaves its devices while others use them: for models that fit only one at a time.

A copy of weights that is made of a trained one needs room for both at once. So such a plan either generates with the
weights that are trained, in their layout, or keeps the copy on other devices.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from prefect_rlhf.placement.cost.call_bytes import static_bytes
from prefect_rlhf.placement.cost.execution import Execution
from prefect_rlhf.placement.cost.sizes import ModelSizes
from prefect_rlhf.placement.graph import Call, DataflowGraph
from prefect_rlhf.placement.memory.bytes import usable_bytes
from prefect_rlhf.placement.plan import ExecutionPlan, Offload, instances
from prefect_rlhf.placement.planner.candidates import Candidate, Candidates, CostContext, MemoryBounds
from prefect_rlhf.placement.planner.plan_problem import PlanProblem, plan_problem
from prefect_rlhf.placement.search.problem import PairNode, ProblemNode

FORBIDDEN = 10**12  # microseconds, of a move for which there is no room


def time_sharing_bound(setting: CostContext, found: Candidates, iterations: int) -> PlanProblem:
    """The problem in which nothing is on a device but while it is used; `found` are all candidates.

    What trained models take over the host link counts as nothing, so its bound holds for plans that offload less, too.
    """
    stay = {name: _offloaded_or_all(every) for name, every in found.items()}
    leave = {name: tuple(_away(one) for one in every) for name, every in stay.items()}
    return _with_room(plan_problem(setting, leave, iterations), stay, setting)


def time_sharing_problem(setting: CostContext, found: Candidates, iterations: int) -> PlanProblem:
    """The problem whose plans are run: a model stays, or comes for each call and goes after it while devices wait."""
    stay: dict[str, tuple[Candidate, ...]] = {}
    choice: dict[str, tuple[Candidate, ...]] = {}
    for name, every in found.items():
        call, resident = setting.graph.call(name), [one for one in every if one.placement.offload == "none"]
        leaving = [_in_turn(call, one, setting) for one in resident]
        staying = [] if call.kind == "train_step" else [replace(one, least=one.most) for one in resident]
        stay[name], choice[name] = tuple(resident + resident[: len(staying)]), tuple(leaving + staying)
    return _with_room(plan_problem(setting, choice, iterations), stay, setting)


def keep_resident_where_free(
    plan: ExecutionPlan,
    graph: DataflowGraph,
    fits: Callable[[ExecutionPlan], bool],
    seconds: Callable[[ExecutionPlan], float],
) -> ExecutionPlan:
    """The plan with each copy of weights on its devices for good, or all but its optimizer, where that is free."""
    least = seconds(plan)
    for calls in instances(graph, plan).values():
        for changed in _staying(plan, calls):
            if changed != plan and fits(changed) and (takes := seconds(changed)) <= least:
                plan, least = changed, takes
                break
    return plan


def _staying(plan: ExecutionPlan, calls: Sequence[Call]) -> Iterator[ExecutionPlan]:
    """With more of what these calls share on its devices; the most first."""
    names, trained = {call.name for call in calls}, any(call.kind == "train_step" for call in calls)
    parts: tuple[Offload, ...] = ("none", "optimizer") if trained else ("none",)
    for part in parts:
        placed = ((name, replace(old, offload=part) if name in names else old) for name, old in plan.placements)
        yield replace(plan, placements=tuple(placed))


def _offloaded_or_all(every: tuple[Candidate, ...]) -> tuple[Candidate, ...]:
    """Those that are offloaded, whose time on the host link is known; of a trained model, all."""
    return tuple(one for one in every if one.placement.offload == "all") or every


def _away(one: Candidate) -> Candidate:
    return replace(one, placement=replace(one.placement, offload="all"), least=MemoryBounds(0, one.least.peak))


def _in_turn(call: Call, one: Candidate, setting: CostContext) -> Candidate:
    """It with its weights, or all that its training keeps, brought before and taken away after it."""
    both_ways = 2 * _host_seconds(call, one, setting)
    placement, seconds = replace(one.placement, offload="all"), one.seconds + both_ways
    return replace(one, placement=placement, seconds=seconds, least=MemoryBounds(0, one.most.peak))


def _host_seconds(call: Call, one: Candidate, setting: CostContext) -> float:
    """One way over the host link, without gradients, which come back as zeros."""
    strategy, sizes = one.placement.strategy, ModelSizes.of(setting.graph.model(call.role or ""))
    trains = call.kind == "train_step"
    held = (static_bytes(Execution(strategy), sizes, trains, stage) for stage in {0, strategy.pp - 1})
    links = setting.sources.links((one.placement.mesh,))
    return links.seconds(max(one.weights + one.optimizer for one in held), "host")


def _with_room(posed: PlanProblem, stay: Candidates, setting: CostContext) -> PlanProblem:
    """Without moves of weights between overlapping meshes that cannot hold both copies; `stay` has their bytes."""
    nodes = tuple(_roomy(node, stay, setting) for node in posed.problem.nodes)
    return replace(posed, problem=replace(posed.problem, nodes=nodes))


def _roomy(node: ProblemNode, stay: Candidates, setting: CostContext) -> ProblemNode:
    if not isinstance(node, PairNode) or node.microseconds.ndim == 2:
        return node
    trained, readers = stay[node.first], stay[node.second]
    both = _static(trained)[:, None] + _static(readers)[None, :]
    full = both > np.array([_roomiest(one, setting) for one in readers])[None, :]
    microseconds = node.microseconds.copy()
    microseconds[1][full] = FORBIDDEN
    microseconds[2][full & (microseconds[2] > 0)] = FORBIDDEN
    return replace(node, microseconds=microseconds)


def _static(options: Sequence[Candidate]) -> NDArray[np.int64]:
    return np.array([one.least.static for one in options], dtype=np.int64)


def _roomiest(one: Candidate, setting: CostContext) -> int:
    """What the largest device of a candidate's mesh may fill."""
    mesh = one.placement.mesh
    nodes = range(mesh.first_node, mesh.first_node + mesh.num_nodes)
    return usable_bytes(max(setting.cluster.memory_bytes(node) for node in nodes))
