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
from prefect_rlhf.placement.cost.node import NodeCosts
from prefect_rlhf.placement.cost.sizes import ModelSizes
from prefect_rlhf.placement.cost.workload import CallWork
from prefect_rlhf.placement.layout.alignment import aligned
from prefect_rlhf.placement.plan import ExecutionPlan, Placement
from prefect_rlhf.placement.planner.candidates import Candidate, CostContext
from prefect_rlhf.placement.planner.plan_problem import MICROSECONDS, PlanProblem
from prefect_rlhf.placement.plans.completion import completed
from prefect_rlhf.placement.schedule.estimate import ITERATIONS, Estimate, estimate_with
from prefect_rlhf.placement.search.driver import search
from prefect_rlhf.placement.search.problem import PairNode

NO_LIMIT_SECONDS = 1e6
ROUNDS = 24  # of searches, at most
NOTHING = 1e-3  # of an iteration: how near to its bound a search comes

Placements = Mapping[str, Placement]


@dataclass(frozen=True, slots=True)
class Found:
    """Seconds of an iteration, and the placements of the calls with a model."""

    seconds: float
    placements: Placements


def best_with_moves(posed: PlanProblem, context: CostContext, evaluations: int) -> Found | None:
    """The fastest of the plans that the rounds of searches find; None where the first finds none."""
    best: Found | None = None
    for _ in range(ROUNDS):
        result = search(posed.problem, NO_LIMIT_SECONDS, max_gap=NOTHING, max_evaluations=evaluations)
        if result.plan is None:
            break
        placements = posed.placements(result.plan)
        made = timed(placements, context)
        if best is None or made.seconds < best.seconds:
            best = Found(made.seconds, placements)
        if made.seconds * ITERATIONS <= result.makespan_seconds * (1 + NOTHING):
            break
        known = _with_known_moves(posed, placements, made)
        if known is None:
            break
        posed = known
    return best


def timed(placements: Placements, context: CostContext) -> Estimate:
    """Its augmented graph, each call as the context's engines run it."""
    graph = context.graph
    first = next(iter(placements.values())).mesh.devices()[0]
    whole = completed(graph, placements, context.site.cluster.whole, first)
    plan = aligned(ExecutionPlan("paper", context.site.cluster, whole), graph)
    calls = {name: _call_seconds(name, placement, context) for name, placement in placements.items()}
    calls |= {call.name: 0.0 for call in graph if call.kind == "compute"}
    moves = NodeCosts(graph, plan, context.question.workload, context.site.sources)

    def seconds(node: Node) -> float:
        return calls[node.call.name] if node.call and node.kind == node.call.kind else moves.seconds(node)

    return estimate_with(graph, plan, seconds)


def _call_seconds(name: str, placement: Placement, context: CostContext) -> float:
    call = context.graph.call(name)
    work, sizes = CallWork.of(call, context.question.workload), ModelSizes.of(context.graph.model(call.role or ""))
    return context.site.sources.call_cost(work, context.execution(placement), sizes, placement.mesh).total


def _with_known_moves(posed: PlanProblem, placements: Placements, made: Estimate) -> PlanProblem | None:
    """The problem with the moves of a timed plan as they are; None where it counts them so already."""
    nodes = tuple(
        _known(node, posed, placements, made) if isinstance(node, PairNode) else node for node in posed.problem.nodes
    )
    if all(new is old for new, old in zip(nodes, posed.problem.nodes, strict=True)):
        return None
    return replace(posed, problem=replace(posed.problem, nodes=nodes))


def _known(node: PairNode, posed: PlanProblem, placements: Placements, made: Estimate) -> PairNode:
    """The node with what the timed plan's move takes, for all options of the two calls with its layouts."""
    source, target = placements[node.first], placements[node.second]
    role = next(call.role for call in posed.problem.calls if call.name == node.second)
    lie = 2 if source.mesh == target.mesh else int(source.mesh.overlaps(target.mesh))
    took = max((slot.seconds for slot in made.schedule.slots if _feeds(slot.node, target, role)), default=0.0)
    alike = np.ix_(*(_with_layout(posed.candidates[name], placements[name]) for name in (node.first, node.second)))
    known = node.microseconds.copy()
    known[lie][alike] = np.maximum(known[lie][alike], int(took * MICROSECONDS))
    return node if np.array_equal(known, node.microseconds) else replace(node, microseconds=known)


def _feeds(node: Node, target: Placement, role: str | None) -> bool:
    """Whether it moves a role's weights to where a call reads them."""
    to = node.target
    return (
        node.kind == "reallocate"
        and to is not None
        and to.role == role
        and (to.mesh, to.strategy, to.engine) == (target.mesh, target.strategy, target.engine)
    )


def _with_layout(every: Sequence[Candidate], placement: Placement) -> list[int]:
    """Positions of the candidates with its engine and strategy, on meshes like its own."""
    return [
        at
        for at, one in enumerate(every)
        if (one.placement.engine, one.placement.strategy) == (placement.engine, placement.strategy)
        and one.placement.mesh.num_nodes == placement.mesh.num_nodes
        and one.placement.mesh.devices_per_node == placement.mesh.devices_per_node
    ]
