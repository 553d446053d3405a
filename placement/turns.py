"""Plans in which every model leaves its devices while others use them: for models that fit only one at a time.

A copy of weights that is made of a trained one needs room for both at once. So such a plan either generates with the
weights that are trained, in their layout, or keeps the copy on other devices.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from prefect_rlhf.placement.candidates import Candidate, Held, Setting
from prefect_rlhf.placement.certificate import usable_bytes
from prefect_rlhf.placement.graph import Call, DataflowGraph
from prefect_rlhf.placement.instances import instances
from prefect_rlhf.placement.plan import ExecutionPlan, Offload
from prefect_rlhf.placement.plan_problem import Counted, PlanProblem, plan_problem
from prefect_rlhf.placement.search.problem import PairNode, ProblemNode

FORBIDDEN = 10**12  # microseconds, of a move for which there is no room


def turns_problem(
    setting: Setting, found: Mapping[str, tuple[Candidate, ...]], iterations: int, counted: Counted
) -> PlanProblem:
    """The problem in which nothing is on a device but while it is used; `found` are all candidates.

    What trained models take over the host link counts as nothing. So with bytes counted at the least its bound holds
    for plans that offload less, too.
    """
    stay = {name: _leaving_or_all(every) for name, every in found.items()}
    leave = {name: tuple(_leaves(one, counted) for one in every) for name, every in stay.items()}
    posed = plan_problem(setting, leave, iterations)
    nodes = tuple(_with_room(node, stay, setting) for node in posed.problem.nodes)
    return PlanProblem(replace(posed.problem, nodes=nodes), leave)


def staying_where_it_may(
    plan: ExecutionPlan,
    graph: DataflowGraph,
    fits: Callable[[ExecutionPlan], bool],
    seconds: Callable[[ExecutionPlan], float],
) -> ExecutionPlan:
    """The plan with each copy of weights on its devices for good, or all but its optimizer, where it fits and pays."""
    for calls in instances(graph, plan).values():
        for changed in _staying(plan, calls):
            if fits(changed) and seconds(changed) < seconds(plan):
                plan = changed
                break
    return plan


def _staying(plan: ExecutionPlan, calls: Sequence[Call]) -> Iterator[ExecutionPlan]:
    """With more of what these calls share on its devices; the most first."""
    names, trained = {call.name for call in calls}, any(call.kind == "train_step" for call in calls)
    parts: tuple[Offload, ...] = ("none", "optimizer") if trained else ("none",)
    for part in parts:
        placed = ((name, replace(old, offload=part) if name in names else old) for name, old in plan.placements)
        yield replace(plan, placements=tuple(placed))


def _leaving_or_all(every: tuple[Candidate, ...]) -> tuple[Candidate, ...]:
    """Those that are offloaded, whose time on the host link is known; of a trained model, all."""
    return tuple(one for one in every if one.placement.offload == "all") or every


def _leaves(one: Candidate, counted: Counted) -> Candidate:
    peak = one.least.peak if counted == "least" else one.most.peak
    return replace(one, placement=replace(one.placement, offload="all"), least=Held(0, peak))


def _with_room(node: ProblemNode, stay: Mapping[str, tuple[Candidate, ...]], setting: Setting) -> ProblemNode:
    """Moves of weights, without those between overlapping meshes that cannot hold both copies."""
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


def _roomiest(one: Candidate, setting: Setting) -> int:
    """What the largest device of a candidate's mesh may fill."""
    mesh = one.placement.mesh
    nodes = range(mesh.first_node, mesh.first_node + mesh.num_nodes)
    return usable_bytes(max(setting.cluster.memory_bytes(node) for node in nodes))
