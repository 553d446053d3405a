"""Plans that differ from one plan in a single call: the most promising first, as the search's problem ranks them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import islice

from prefect_rlhf.placement.errors import RlhfError
from prefect_rlhf.placement.layout.alignment import aligned
from prefect_rlhf.placement.plan import ExecutionPlan, Placement
from prefect_rlhf.placement.planner.candidates import Candidates, CostContext
from prefect_rlhf.placement.planner.plan_problem import PlanProblem, plan_problem
from prefect_rlhf.placement.planner.question import Planner
from prefect_rlhf.placement.plans.check import check_plan
from prefect_rlhf.placement.plans.completion import completed
from prefect_rlhf.placement.schedule.estimate import ITERATIONS
from prefect_rlhf.placement.search.alternatives import Alternative, alternatives
from prefect_rlhf.placement.search.problem import Choice

NOTHING = 1e-3  # of an iteration: a difference that no estimate means


def neighbours(
    planner: Planner, plan: ExecutionPlan, setting: CostContext, every: Candidates
) -> dict[str, Iterator[tuple[Placement, bool]]]:
    """Of each call with a model: its other meshes and strategies, all other calls as they are, the fastest first.

    With each, whether the problem has room for it. `every` are the calls' candidates.
    """
    posed = _posed(plan, setting, every)
    chosen = {call.name: _choice(posed, call.name, plan[call.name]) for call in posed.problem.calls}
    ranked = alternatives(posed.problem, chosen)
    return {name: _others(posed, plan[name], name, found) for name, found in ranked.items()}


def changed_plan(planner: Planner, plan: ExecutionPlan, call: str, placement: Placement) -> ExecutionPlan | None:
    """The plan with one call placed otherwise; None where that is not legal. Evaluation follows its siblings."""
    graph = planner.graph
    every = {name: replace(old, device_order=()) for name, old in plan.placements}
    computes = [old.mesh.devices()[0] for old in every.values() if old.engine == "python"]
    chosen = {one.name: every[one.name] for one in graph if one.kind != "compute" and one.every is None}
    chosen[call] = placement
    device = (computes or [placement.mesh.devices()[0]])[0]
    try:
        placements = completed(graph, chosen, planner.mesh, device)
        return aligned(check_plan(replace(plan, placements=placements), graph, planner.mesh), graph)
    except RlhfError:
        return None


def _posed(plan: ExecutionPlan, setting: CostContext, every: Candidates) -> PlanProblem:
    """The problem that ranks: bytes of the fullest device, unless something is offloaded, which it knows nothing of."""
    stays = all(placement.offload == "none" for _, placement in plan.placements)
    return plan_problem(setting, every, ITERATIONS, "most" if stays else "least")


def _choice(posed: PlanProblem, call: str, placement: Placement) -> Choice:
    """The candidate that the plan took, or the one most like it; what differs are micro-batches and offloads."""

    def unlike(option: int) -> tuple[bool, bool, int, bool]:
        other = posed.candidates[call][option].placement
        cuts = abs(other.micro_batches - placement.micro_batches)
        return other.strategy != placement.strategy, other.engine != placement.engine, cuts, other.offload != "none"

    mesh = next(i for i, one in enumerate(posed.problem.meshes) if one.label == placement.mesh.name)
    options = range(len(posed.candidates[call]))
    here = [i for i in options if mesh in posed.problem.mesh_classes[posed.candidates[call][i].mesh_class]]
    return Choice(min(here, key=unlike), mesh)


def _others(
    posed: PlanProblem, kept: Placement, call: str, every: Sequence[Alternative]
) -> Iterator[tuple[Placement, bool]]:
    """Other meshes and strategies, the fastest first, and whether the problem has room for them."""
    seen = {(kept.mesh, kept.strategy)}
    for one in every:
        placement = posed.placements({call: one.choice})[call]
        if (placement.mesh, placement.strategy) not in seen:
            if one.has_room:
                seen.add((placement.mesh, placement.strategy))
            yield replace(placement, offload=kept.offload), one.has_room


TRIED = 2  # placements of a call


def polished(planner: Planner, plan: ExecutionPlan, setting: CostContext, every: Candidates) -> ExecutionPlan:
    """The plan, or a faster one that fits; each call is looked at once. `every` are the calls' candidates."""
    seconds = planner.seconds(plan)
    for call, others in neighbours(planner, plan, setting, every).items():
        for placement in islice((placement for placement, has_room in others if has_room), TRIED):
            changed = changed_plan(planner, plan, call, placement)
            if changed is None:
                continue
            takes = planner.seconds(changed)
            if takes < seconds * (1 - NOTHING) and planner.fits(changed):
                plan, seconds = changed, takes
                break
    return plan
