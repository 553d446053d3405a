"""From a graph to the best plan that a search finds, how good it can be at most, and what the presets would take.

The search solves `plan_problem`. What it finds is completed, aligned, certified, and timed on its augmented graph. For
each preset the same search chooses strategies on the preset's meshes. The fastest of all that fit is the plan; the
bound is that of the whole space.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace

from prefect_rlhf.placement.cost.sources import CostSources
from prefect_rlhf.placement.cost.workload import Workload
from prefect_rlhf.placement.errors import InvalidInput
from prefect_rlhf.placement.graph import DataflowGraph
from prefect_rlhf.placement.lease import Backend
from prefect_rlhf.placement.mesh import ClusterShape, DeviceMesh
from prefect_rlhf.placement.plan import ExecutionPlan
from prefect_rlhf.placement.planner.candidates import Candidates, CostContext
from prefect_rlhf.placement.planner.neighbours import polished
from prefect_rlhf.placement.planner.plan_problem import PlanProblem, all_candidates, plan_problem
from prefect_rlhf.placement.planner.planned import Planned
from prefect_rlhf.placement.planner.preset_plan import _preset
from prefect_rlhf.placement.planner.question import Planner
from prefect_rlhf.placement.planner.refusal import _too_large, _with_memory
from prefect_rlhf.placement.planner.restrictions import divisions, pinned
from prefect_rlhf.placement.planner.time_sharing import (
    keep_resident_where_free,
    time_sharing_bound,
    time_sharing_problem,
)
from prefect_rlhf.placement.plans.presets import PRESETS
from prefect_rlhf.placement.schedule.estimate import ITERATIONS
from prefect_rlhf.placement.search.driver import Method, Progress, SearchResult, search

FIRST_SHARE = 0.5  # of the budget, for the search of the whole space
FITTING_SHARE = 0.2  # for each other way to count memory, where its plan does not fit
PRESET_SHARE = 0.03  # for each preset: with meshes given, little is left to choose
SMALLER = (0.9, 0.8, 0.7, 0.6, 0.5)  # shares of memory, for plans that offload
TIGHTER = (1.0, 0.99, 0.98, 0.96, 0.94, 0.9, 0.8)  # where models take turns, and little room is left


def plan_graph(
    graph: DataflowGraph,
    cluster: ClusterShape,
    mesh: DeviceMesh,
    workload: Workload,
    sources: CostSources,
    budget_seconds: float = 5.0,
    method: Method = "exact",
    kind: Backend = "cuda",
    progress: Callable[[Progress], None] | None = None,
    pins: Mapping[str, DeviceMesh] | None = None,
) -> Planned:
    """The best plan of `graph` on the leased `mesh` that was found within about `budget_seconds` of search.

    `pins` are calls that must be on these meshes. Raises InvalidInput for a budget that is not positive, a mesh outside
    the cluster, and when no plan fits.
    """
    if not budget_seconds > 0:
        raise InvalidInput("budget_seconds", budget_seconds, "more than 0 seconds")
    cluster.check_mesh(mesh)
    planner = Planner(graph, cluster, mesh, workload, sources, kind)
    setting = planner.setting()
    setting, every = pinned(setting, all_candidates(setting), pins or {})
    posed = plan_problem(setting, every, ITERATIONS)
    first = search(posed.problem, FIRST_SHARE * budget_seconds, method, progress=progress)
    presets = tuple(_preset(planner, setting, every, name, PRESET_SHARE * budget_seconds) for name in PRESETS)
    fitting = _fitting(planner, setting, every, posed, first, FITTING_SHARE * budget_seconds, method)
    timed = [(plan, planner.estimate(plan)) for plan in (*fitting, *_divided(planner, setting, every, budget_seconds))]
    timed += [(one.plan, one.estimate) for one in presets if one.plan and one.estimate]
    if not timed:
        turns, first = _in_turns(planner, setting, every, FIRST_SHARE * budget_seconds, method)
        timed = [(plan, planner.estimate(plan)) for plan in turns]
    if not timed:
        raise _too_large(planner, time_sharing_problem(setting, every, ITERATIONS), budget_seconds / 4)
    best, _ = min(timed, key=lambda pair: pair[1].seconds)
    best = polished(planner, replace(best, name="auto"), setting, every)
    best = keep_resident_where_free(best, graph, planner.fits, planner.seconds)
    plan, made = planner.with_computations(best)
    bound = min(first.lower_bound_seconds / ITERATIONS, made.seconds)
    return Planned(plan, made, planner.certificate(plan), bound, first.binding, first, presets, every)


def _fitting(
    planner: Planner,
    setting: CostContext,
    every: Candidates,
    posed: PlanProblem,
    first: SearchResult,
    budget_seconds: float,
    method: Method,
) -> Iterator[ExecutionPlan]:
    """What the search found, if it fits; else the best without offloading, and the first that fits with it."""
    plan = planner.fitting_plan("auto", posed, first)
    if plan is not None:
        yield plan
        return
    cautious = plan_problem(setting, every, ITERATIONS, "most")
    plan = planner.fitting_plan("auto", cautious, search(cautious.problem, budget_seconds, method))
    if plan is not None:
        yield plan
    for share in SMALLER:
        found = search(_with_memory(posed.problem, share), budget_seconds / len(SMALLER), method)
        plan = planner.fitting_plan("auto", posed, found)
        if plan is not None:
            yield plan
            return


def _divided(
    planner: Planner, setting: CostContext, every: Candidates, budget_seconds: float
) -> Iterator[ExecutionPlan]:
    """Plans that keep kinds of nodes apart, where there are several; the search of the whole may miss them."""
    for part in divisions(setting, every):
        posed = plan_problem(setting, part, ITERATIONS, "most")
        plan = planner.fitting_plan("auto", posed, search(posed.problem, PRESET_SHARE * budget_seconds))
        if plan is not None:
            yield plan


def _in_turns(
    planner: Planner, setting: CostContext, every: Candidates, budget_seconds: float, method: Method
) -> tuple[list[ExecutionPlan], SearchResult]:
    """Plans that fit because models leave their devices in turns, if any do, and the search that bounds them."""
    bounded = search(time_sharing_bound(setting, every, ITERATIONS).problem, budget_seconds / 2, method)
    parts = (every, *divisions(setting, every))
    each = budget_seconds / 2 / len(parts) / len(TIGHTER)
    plans = (_taking_turns(planner, time_sharing_problem(setting, part, ITERATIONS), each) for part in parts)
    return [plan for plan in plans if plan is not None], bounded


def _taking_turns(planner: Planner, posed: PlanProblem, budget_seconds: float) -> ExecutionPlan | None:
    """The first plan that fits, of searches in ever less memory."""
    for share in TIGHTER:
        found = search(_with_memory(posed.problem, share), budget_seconds)
        plan = planner.fitting_plan("auto", posed, found)
        if plan is not None:
            return plan
    return None
