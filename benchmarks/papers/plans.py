"""The best plan of a paper's setting, with the time that its moves of weights and rows take.

The search's problem counts moves of weights at the least that they can take. What it finds is timed on its augmented
graph, the moves between the layouts that it chose are set to what they take there, and it is searched again, until the
moves of what it finds are known.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from prefect_rlhf.placement.augmented.node import Node
from prefect_rlhf.placement.augmented.work import Reallocate
from prefect_rlhf.placement.cost.node import NodeCosts
from prefect_rlhf.placement.cost.sizes import ModelSizes
from prefect_rlhf.placement.cost.workload import CallWork
from prefect_rlhf.placement.layout.alignment import aligned
from prefect_rlhf.placement.plan import ExecutionPlan, Placement
from prefect_rlhf.placement.planner.space.candidates import Candidate, CostContext
from prefect_rlhf.placement.planner.space.plan_problem import MICROSECONDS, PlanProblem
from prefect_rlhf.placement.plans.completion import completed
from prefect_rlhf.placement.schedule.estimate import Estimate, estimate_with
from prefect_rlhf.placement.search.driver import search
from prefect_rlhf.placement.search.problem import PairNode

NO_LIMIT_SECONDS = 1e6
ROUNDS = 24  # of searches, at most
NOTHING = 1e-3  # of an iteration: how near to its bound a search comes

Placements = Mapping[str, Placement]


@dataclass(frozen=True, slots=True)
class TimedPlan:
    """Seconds of an iteration, and the placements of the calls with a model."""

    seconds: float
    placements: Placements


def best_with_moves(problem: PlanProblem, context: CostContext, evaluations: int) -> TimedPlan | None:
    """Return the fastest plan that the rounds of searches find; None where the first finds none."""
    best: TimedPlan | None = None
    for _ in range(ROUNDS):
        result = search(problem.problem, NO_LIMIT_SECONDS, max_gap=NOTHING, max_evaluations=evaluations)
        if result.plan is None:
            break
        placements = problem.placements(result.plan)
        estimate = timed(placements, context)
        if best is None or estimate.seconds < best.seconds:
            best = TimedPlan(estimate.seconds, placements)
        if estimate.seconds <= result.seconds * (1 + NOTHING):
            break
        nodes = tuple(
            _with_known_move(node, problem, placements, estimate) if isinstance(node, PairNode) else node
            for node in problem.problem.nodes
        )
        if all(new is old for new, old in zip(nodes, problem.problem.nodes, strict=True)):
            break  # moves were counted as they are
        problem = replace(problem, problem=replace(problem.problem, nodes=nodes))
    return best


def timed(placements: Placements, context: CostContext) -> Estimate:
    """Estimate a plan on its augmented graph, each call as the context's engines run it."""
    graph, site, workload = context.graph, context.site, context.question.workload
    first = next(iter(placements.values())).mesh.devices()[0]
    whole = completed(graph, placements, site.cluster.whole, first, site.backend)
    plan = aligned(ExecutionPlan("paper", site.cluster, whole), graph)
    calls = {call.name: 0.0 for call in graph if call.kind == "compute"}
    for name, placement in placements.items():
        call = graph.call(name)
        work, sizes = CallWork.of(call, workload), ModelSizes.of(graph.model(call.role or ""))
        calls[name] = site.sources.call_cost(work, context.execution(placement), sizes, placement.mesh).total
    moves = NodeCosts(graph, plan, workload, site.sources)

    def seconds(node: Node) -> float:
        return calls[node.call.name] if node.call and node.kind == node.call.kind else moves.seconds(node)

    return estimate_with(graph, plan, seconds)


def _with_known_move(node: PairNode, problem: PlanProblem, placements: Placements, estimate: Estimate) -> PairNode:
    """Set what the timed plan's move takes, for all options of the two calls with its layouts."""
    source, target = placements[node.first], placements[node.second]
    role = next(call.role for call in problem.problem.calls if call.name == node.second)
    relation = 2 if source.mesh == target.mesh else int(source.mesh.overlaps(target.mesh))
    slots = (slot for slot in estimate.schedule.slots if _feeds(slot.node, target, role))
    seconds = max((slot.seconds for slot in slots), default=0.0)
    alike = np.ix_(*(_with_layout(problem.candidates[name], placements[name]) for name in (node.first, node.second)))
    microseconds = node.by_option.copy()
    microseconds[relation][alike] = np.maximum(microseconds[relation][alike], int(seconds * MICROSECONDS))
    unchanged = np.array_equal(microseconds, node.by_option)
    return node if unchanged else replace(node, microseconds=microseconds, kinds=None)


def _feeds(node: Node, target: Placement, role: str | None) -> bool:
    """Whether it moves a role's weights to where a call reads them."""
    if not isinstance(node.work, Reallocate) or node.work.target.role != role:
        return False
    written = node.work.target
    return (written.mesh, written.strategy, written.engine) == (target.mesh, target.strategy, target.engine)


def _with_layout(candidates: Sequence[Candidate], placement: Placement) -> list[int]:
    """Positions of the candidates with its engine and strategy, on meshes like its own."""
    layout = _layout(placement)
    return [at for at, candidate in enumerate(candidates) if _layout(candidate.placement) == layout]


def _layout(placement: Placement) -> tuple[object, ...]:
    mesh = placement.mesh
    return placement.engine, placement.strategy, mesh.num_nodes, mesh.devices_per_node
