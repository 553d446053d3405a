"""Plans that differ from a given plan in a single call, and local search among them on the full estimate.

The search's own problem ranks them. The estimate counts more: transfers of rows and copies that several calls share.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import islice

from prefect_rlhf.errors.errors import RlhfError
from prefect_rlhf.placement.engine_traits import TRAITS
from prefect_rlhf.placement.layout.alignment import aligned
from prefect_rlhf.placement.plan import ExecutionPlan, Placement
from prefect_rlhf.placement.planner.question import Question, with_copies_agreed
from prefect_rlhf.placement.planner.space.plan_problem import PlanProblem, PlanSpace
from prefect_rlhf.placement.plans.check import check_plan
from prefect_rlhf.placement.plans.completion import completed
from prefect_rlhf.placement.search.alternatives import Alternative, alternatives
from prefect_rlhf.placement.search.budget import ESTIMATE, Budget, Meter
from prefect_rlhf.placement.search.problem import Choice

NEGLIGIBLE = 1e-3  # of an iteration: a difference that no estimate means
WHOLE_CACHE = 1e6  # GiB that stand for a cache of all rows
TRIED = 6  # placements of a call, by the local search
ROUNDS = 3


def improve_locally(
    question: Question, plan: ExecutionPlan, space: PlanSpace, meter: Meter | None = None
) -> ExecutionPlan:
    """Move single calls while an iteration gets shorter and the plan fits, until the meter's budget is spent.

    Each call is examined again after another call moved.
    """
    meter = meter or Meter(Budget())
    for _ in range(ROUNDS):
        improved = _improve_once(question, plan, space, meter)
        if improved == plan:
            break
        plan = improved
    return plan


def _improve_once(question: Question, plan: ExecutionPlan, space: PlanSpace, meter: Meter) -> ExecutionPlan:
    seconds = question.seconds(plan)
    for call, others in neighbours(plan, space).items():
        for placement in islice((placement for placement, has_room in others if has_room), TRIED):
            if meter.left.is_spent:
                return plan
            changed = changed_plan(question, plan, call, placement)
            if changed is None:
                continue
            meter.spend(ESTIMATE)
            changed_seconds = question.seconds(changed)
            if changed_seconds < seconds * (1 - NEGLIGIBLE) and question.fits(changed):
                plan, seconds = changed, changed_seconds
                break
    return plan


def neighbours(plan: ExecutionPlan, space: PlanSpace) -> dict[str, Iterator[tuple[Placement, bool]]]:
    """Rank the other meshes and strategies of each call with a model, the fastest first; other calls are unchanged.

    Each is returned with whether the problem has room for it, by the bytes of the fullest device.
    """
    problem = space.most
    choices = {call.name: _choice(problem, call.name, plan[call.name]) for call in problem.problem.calls}
    ranked = alternatives(problem.problem, choices)
    return {name: _others(problem, plan[name], name, options) for name, options in ranked.items()}


def changed_plan(question: Question, plan: ExecutionPlan, call: str, placement: Placement) -> ExecutionPlan | None:
    """Return the plan with a call placed otherwise; None if that is illegal. Evaluation follows its siblings."""
    graph, mesh = question.graph, question.site.mesh
    placements = {name: replace(old, device_order=()) for name, old in plan.placements}
    computes = [old.mesh.devices()[0] for old in placements.values() if not TRAITS[old.engine].holds_weights]
    chosen = {other.name: placements[other.name] for other in graph if other.kind != "compute" and other.every is None}
    chosen[call] = placement
    device = (computes or [placement.mesh.devices()[0]])[0]
    try:
        changed = replace(plan, placements=completed(graph, chosen, mesh, device))
        return aligned(check_plan(with_copies_agreed(changed, graph), graph, mesh), graph)
    except RlhfError:
        return None


def _choice(problem: PlanProblem, call: str, placement: Placement) -> Choice:
    """The candidate that the plan took, or the most similar; others differ in cuts, caches, offloads."""
    options, meshes = problem.candidates[call], problem.problem.meshes
    mesh = next(index for index, interval in enumerate(meshes) if interval.label == placement.mesh.name)

    def unlikeness(option: int) -> tuple[bool, bool, bool, float]:
        other = options[option].placement
        cuts = abs(other.micro_batches - placement.micro_batches)
        caches = abs((other.cache_gib or WHOLE_CACHE) - (placement.cache_gib or WHOLE_CACHE))
        offloads = other.offload != placement.offload
        return other.strategy != placement.strategy, other.engine != placement.engine, offloads, cuts + caches

    on_mesh = [i for i, option in enumerate(options) if mesh in problem.problem.mesh_classes[option.mesh_class]]
    return Choice(min(on_mesh, key=unlikeness), mesh)


def _others(
    problem: PlanProblem, kept: Placement, call: str, ranked: Sequence[Alternative]
) -> Iterator[tuple[Placement, bool]]:
    """Other meshes and strategies, the fastest first, and whether the problem has room for them."""
    seen = {(kept.mesh, kept.strategy)}
    for alternative in ranked:
        placement = problem.placements({call: alternative.choice})[call]
        if (placement.mesh, placement.strategy) not in seen:
            if alternative.has_room:
                seen.add((placement.mesh, placement.strategy))
            offload = kept.offload if kept.engine == placement.engine else placement.offload
            yield replace(placement, offload=offload), alternative.has_room
