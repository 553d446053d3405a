"""Plans that differ from a given plan in a single call, and local search among them.

The search's own problem ranks them. The estimate counts more: transfers of rows and copies that several calls share.
"""

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import islice

from prefect_rlhf.errors.errors import RlhfError
from prefect_rlhf.placement.engine_traits import TRAITS
from prefect_rlhf.placement.graph import DataflowGraph
from prefect_rlhf.placement.layout.alignment import aligned
from prefect_rlhf.placement.plan import ExecutionPlan, Placement
from prefect_rlhf.placement.planner.question import Question, with_copies_agreed
from prefect_rlhf.placement.planner.space.plan_problem import PlanProblem, PlanSpace
from prefect_rlhf.placement.plans.check import check_plan
from prefect_rlhf.placement.plans.completion import completed
from prefect_rlhf.placement.plans.streaming import in_parts
from prefect_rlhf.placement.search.alternatives import Alternative, alternatives
from prefect_rlhf.placement.search.budget import ESTIMATE, Budget, Meter
from prefect_rlhf.placement.search.driver import MICROSECOND
from prefect_rlhf.placement.search.partial.complete import INFINITE
from prefect_rlhf.placement.search.problem import Choice

NEGLIGIBLE = 1e-3  # of an iteration: a difference that no estimate means
WHOLE_CACHE = 1e6  # GiB that stand for a cache of all rows
TRIED = 6  # placements of a call, by the local search
ROUNDS = 9


def improve_locally(
    question: Question, plan: ExecutionPlan, space: PlanSpace, meter: Meter | None = None
) -> ExecutionPlan:
    """Move calls while an iteration gets shorter and the plan fits, until the meter's budget is spent.

    Each call is examined again after another call moved.
    """
    meter = meter or Meter(Budget())
    for _ in range(ROUNDS):
        before, plan = plan, _improve_once(question, plan, space, meter)
        if plan == before:
            break
    return plan


def _improve_once(question: Question, plan: ExecutionPlan, space: PlanSpace, meter: Meter) -> ExecutionPlan:
    seconds = question.seconds(plan)
    for call, others in neighbours(plan, space, seconds).items():
        for other in islice((other for other in others if other.has_room), TRIED):
            if meter.left.is_spent:
                return plan
            if other.seconds >= seconds:
                break  # so are the rest, and the estimate counts more
            changed = changed_plan(question, plan, {call: other.placement})
            if changed is None:
                continue
            meter.spend(ESTIMATE)
            changed_seconds = question.seconds(changed)
            if changed_seconds < seconds * (1 - NEGLIGIBLE) and question.fits(changed):
                plan, seconds = changed, changed_seconds
                break
    return plan


@dataclass(frozen=True, slots=True)
class Neighbour:
    """Another placement of a call: the seconds of an iteration, and whether there is room, by the problem."""

    placement: Placement
    seconds: float
    has_room: bool


def neighbours(
    plan: ExecutionPlan, space: PlanSpace, most_seconds: float | None = None
) -> dict[str, Iterator[Neighbour]]:
    """Rank the other meshes and strategies of each call with a model, the fastest first; other calls are unchanged.

    With `most_seconds`, slower placements are left out. The problem counts the bytes of the fullest device.
    """
    problem = space.most
    choices = {call.name: _choice(problem, call.name, plan[call.name]) for call in problem.problem.calls}
    most_us = INFINITE if most_seconds is None else math.ceil(most_seconds / MICROSECOND)
    ranked = alternatives(problem.problem, choices, most_us)
    return {name: _others(problem, plan[name], name, options) for name, options in ranked.items()}


def changed_plan(
    question: Question, plan: ExecutionPlan, placements_of: Mapping[str, Placement]
) -> ExecutionPlan | None:
    """Return the plan with some calls placed otherwise; None if that is illegal. Evaluation follows its siblings.

    If the plan streams parts, all calls that then may stream do, in as many parts: the two plans are priced alike.
    """
    graph, mesh = question.graph, question.site.mesh
    placements = {name: replace(old, device_order=()) for name, old in plan.placements}
    computes = [old.mesh.devices()[0] for old in placements.values() if not TRAITS[old.engine].holds_weights]
    chosen = {other.name: placements[other.name] for other in graph if other.kind != "compute" and other.every is None}
    chosen |= placements_of
    device = (computes or [next(iter(chosen.values())).mesh.devices()[0]])[0]
    try:
        changed = replace(plan, placements=completed(graph, chosen, mesh, device))
        streamed = _streamed_like(plan, with_copies_agreed(changed, graph), graph)
        return aligned(check_plan(streamed, graph, mesh), graph)
    except RlhfError:
        return None


def _streamed_like(plan: ExecutionPlan, changed: ExecutionPlan, graph: DataflowGraph) -> ExecutionPlan:
    parts = max(placement.parts for _, placement in plan.placements)
    if parts == 1:
        return changed
    whole = replace(changed, placements=tuple((name, replace(old, parts=1)) for name, old in changed.placements))
    return in_parts(graph, whole, parts)


def _choice(problem: PlanProblem, call: str, placement: Placement) -> Choice:
    """The candidate that the plan took, or the most similar; others differ in cuts, caches, offloads."""
    options, meshes = problem.candidates[call], problem.problem.meshes
    mesh = next(index for index, interval in enumerate(meshes) if interval.label == placement.mesh.name)

    def unlikeness(option: int) -> tuple[bool, bool, int, float]:
        other = options[option].placement
        cuts = abs(other.micro_batches - placement.micro_batches)
        caches = abs((other.cache_gib or WHOLE_CACHE) - (placement.cache_gib or WHOLE_CACHE))
        offloads = (other.offload != placement.offload) + (other.recompute != placement.recompute)
        return other.strategy != placement.strategy, other.engine != placement.engine, offloads, cuts + caches

    classes = {index for index, members in enumerate(problem.problem.mesh_classes) if mesh in members}
    on_mesh = [i for i, option in enumerate(options) if option.mesh_class in classes]
    return Choice(min(on_mesh, key=unlikeness), mesh)


def _others(problem: PlanProblem, kept: Placement, call: str, ranked: Iterable[Alternative]) -> Iterator[Neighbour]:
    """Other meshes and strategies, the fastest first."""
    seen = {(kept.mesh, kept.strategy)}
    for alternative in ranked:
        option, mesh = problem.candidates[call][alternative.choice.option], problem.mesh(alternative.choice.mesh)
        if (mesh, option.placement.strategy) not in seen:
            placement = replace(option.placement, mesh=mesh)
            if alternative.has_room:
                seen.add((placement.mesh, placement.strategy))
            offload = kept.offload if kept.engine == placement.engine else placement.offload
            seconds = alternative.makespan_us * MICROSECOND
            yield Neighbour(replace(placement, offload=offload), seconds, alternative.has_room)
