"""From a graph to the best plan that a search finds, how good it can be at most, and what the presets would take.

The search solves `plan_problem`. What it finds is completed, aligned, certified, and timed on its augmented graph. For
each preset the same search chooses strategies on the preset's meshes. The fastest of all that fit is the plan; the
bound is that of the whole space.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Set
from dataclasses import dataclass, replace

from prefect_rlhf.placement.candidates import Candidate, Candidates, Setting, candidate
from prefect_rlhf.placement.certificate import Certificate, byte_size, enough_bytes
from prefect_rlhf.placement.check import problems
from prefect_rlhf.placement.cost.sources import CostSources
from prefect_rlhf.placement.cost.workload import Workload
from prefect_rlhf.placement.divisions import divisions
from prefect_rlhf.placement.errors import InvalidInput, PlanDoesNotFit, RlhfError
from prefect_rlhf.placement.estimate import ITERATIONS, Estimate
from prefect_rlhf.placement.fit import Remedy, refusal
from prefect_rlhf.placement.graph import Call, DataflowGraph
from prefect_rlhf.placement.lease import DeviceKind
from prefect_rlhf.placement.mesh import ClusterShape, DeviceMesh
from prefect_rlhf.placement.pins import pinned
from prefect_rlhf.placement.plan import ExecutionPlan, Placement
from prefect_rlhf.placement.plan_problem import PlanProblem, all_candidates, plan_problem, restricted_problem
from prefect_rlhf.placement.planner import Planner
from prefect_rlhf.placement.polish import polished
from prefect_rlhf.placement.presets import PRESETS, Preset, preset_named
from prefect_rlhf.placement.search.driver import Method, Progress, SearchResult, search
from prefect_rlhf.placement.search.problem import Problem
from prefect_rlhf.placement.strategy import Strategy
from prefect_rlhf.placement.turns import staying_where_it_may, turns_bound, turns_problem

FIRST_SHARE = 0.5  # of the budget, for the search of the whole space
FITTING_SHARE = 0.2  # for each other way to count memory, where its plan does not fit
PRESET_SHARE = 0.03  # for each preset: with meshes given, little is left to choose
SMALLER = (0.9, 0.8, 0.7, 0.6, 0.5)  # shares of memory, for plans that offload
TIGHTER = (1.0, 0.99, 0.98, 0.96, 0.94, 0.9, 0.8)  # where models take turns, and little room is left
LARGER = (1.1, 1.25, 1.5, 2.0, 3.0, 5.0, 8.0)  # and beyond it, to say how much is missing


@dataclass(frozen=True, slots=True)
class Compared:
    """A plan by a name that people know: its estimate, or why there is none."""

    name: str
    plan: ExecutionPlan | None = None
    estimate: Estimate | None = None
    refused: str = ""


@dataclass(frozen=True, slots=True)
class Planned:
    """`lower_bound_seconds`: no plan of the whole space takes less per iteration. `binding` says why, in words.

    `candidates` are what there was to choose from.
    """

    plan: ExecutionPlan
    estimate: Estimate
    certificate: Certificate
    lower_bound_seconds: float
    binding: str
    search: SearchResult
    presets: tuple[Compared, ...]
    candidates: Candidates

    @property
    def seconds(self) -> float:
        """Of one iteration."""
        return self.estimate.seconds

    @property
    def gap(self) -> float:
        """By how much of the lower bound the plan is above it."""
        return self.seconds / self.lower_bound_seconds - 1

    def rows(self) -> list[dict[str, str]]:
        """For a table: the plan and every preset."""
        every = (Compared(self.plan.name, self.plan, self.estimate), *self.presets)
        return [_row(compared, self.seconds) for compared in every]


def plan_graph(
    graph: DataflowGraph,
    cluster: ClusterShape,
    mesh: DeviceMesh,
    workload: Workload,
    sources: CostSources,
    budget_seconds: float = 5.0,
    method: Method = "exact",
    kind: DeviceKind = "cuda",
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
        raise _too_large(planner, turns_problem(setting, every, ITERATIONS), budget_seconds / 4)
    best, _ = min(timed, key=lambda pair: pair[1].seconds)
    best = polished(planner, replace(best, name="auto"), setting, every)
    best = staying_where_it_may(best, graph, planner.fits, planner.seconds)
    plan, made = planner.with_computations(best)
    bound = min(first.lower_bound_seconds / ITERATIONS, made.seconds)
    return Planned(plan, made, planner.certificate(plan), bound, first.binding, first, presets, every)


def _fitting(
    planner: Planner,
    setting: Setting,
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


def _divided(planner: Planner, setting: Setting, every: Candidates, budget_seconds: float) -> Iterator[ExecutionPlan]:
    """Plans that keep kinds of nodes apart, where there are several; the search of the whole may miss them."""
    for part in divisions(setting, every):
        posed = plan_problem(setting, part, ITERATIONS, "most")
        plan = planner.fitting_plan("auto", posed, search(posed.problem, PRESET_SHARE * budget_seconds))
        if plan is not None:
            yield plan


def _in_turns(
    planner: Planner, setting: Setting, every: Candidates, budget_seconds: float, method: Method
) -> tuple[list[ExecutionPlan], SearchResult]:
    """Plans that fit because models leave their devices in turns, if any do, and the search that bounds them."""
    bounded = search(turns_bound(setting, every, ITERATIONS).problem, budget_seconds / 2, method)
    parts = (every, *divisions(setting, every))
    each = budget_seconds / 2 / len(parts) / len(TIGHTER)
    plans = (_taking_turns(planner, turns_problem(setting, part, ITERATIONS), each) for part in parts)
    return [plan for plan in plans if plan is not None], bounded


def _taking_turns(planner: Planner, posed: PlanProblem, budget_seconds: float) -> ExecutionPlan | None:
    """The first plan that fits, of searches in ever less memory."""
    for share in TIGHTER:
        found = search(_with_memory(posed.problem, share), budget_seconds)
        plan = planner.fitting_plan("auto", posed, found)
        if plan is not None:
            return plan
    return None


def _preset(planner: Planner, setting: Setting, every: Candidates, name: str, budget_seconds: float) -> Compared:
    """The best strategies of those that a preset admits, on the meshes that it gives to the calls."""
    try:
        for posed in preset_problems(preset_named(name), planner.mesh, setting, every):
            plan = planner.fitting_plan(name, posed, search(posed.problem, budget_seconds))
            if plan is not None:
                return Compared(name, plan, planner.estimate(plan))
    except RlhfError as error:
        return Compared(name, refused=str(error).splitlines()[0])
    return Compared(name, refused="no strategies on its meshes fit the devices' memory")


def preset_problems(rule: Preset, mesh: DeviceMesh, setting: Setting, every: Candidates) -> Iterator[PlanProblem]:
    """The preset's plan is the best of the first of these that has one: of a symmetric preset, one for each strategy.

    Raises InvalidInput where the mesh has no such parts, or a call cannot run on its part.
    """
    graph = setting.graph
    meshes = {call: rule.mesh(graph.call(call), mesh, graph) for call in every}
    refused: list[InvalidInput] = []
    for strategy in rule.strategies(mesh) if rule.symmetric else (None,):
        allowed = {
            call: frozenset(rule.strategies(on) if strategy is None else (strategy,)) for call, on in meshes.items()
        }

        def admits(call: Call, placement: Placement, allowed: Mapping[str, Set[Strategy]] = allowed) -> bool:
            return placement.engine in rule.engines(call) and placement.strategy in allowed[call.name]

        found = every if rule.micro_batches is None else _cut_alike(rule, strategy, meshes, setting)
        try:
            yield restricted_problem(setting, found, ITERATIONS, meshes, admits)
        except InvalidInput as error:
            refused.append(error)
    if refused:
        raise refused[-1]


def _cut_alike(
    rule: Preset, strategy: Strategy | None, meshes: Mapping[str, DeviceMesh], setting: Setting
) -> Candidates:
    """Of every call the one candidate with this strategy and the preset's number of micro-batches, if it is legal."""
    found: dict[str, tuple[Candidate, ...]] = {}
    for name, mesh in meshes.items():
        call = setting.graph.call(name)
        placement = Placement(mesh, strategy or Strategy(), rule.engines(call)[0], rule.micro_batches or 1)
        legal = not any(problems(call, placement, setting.graph))
        found[name] = (candidate(call, placement, setting),) if legal else ()
    return found


def _too_large(planner: Planner, posed: PlanProblem, budget_seconds: float) -> InvalidInput:
    """How much memory is missing: what the first plan needs that a search finds in more, where models take turns."""
    name = planner.graph.name
    for share in LARGER:
        found = search(_with_memory(posed.problem, share), budget_seconds / len(LARGER))
        plan = planner.plan("auto", posed, found)
        certificate = planner.certificate(plan) if plan else None
        if plan is not None and certificate is not None and not certificate.fits:
            return _refused(planner, plan, certificate)
    seen = f"more than {LARGER[-1]:.0f} times the memory"
    return InvalidInput(f"plan of {name}", seen, "a plan that fits the devices: more devices")


def _refused(planner: Planner, plan: ExecutionPlan, certificate: Certificate) -> PlanDoesNotFit:
    """What fills the devices under the plan that comes nearest, and how large they would have to be for it."""
    peak = certificate.fullest
    assert peak is not None  # an empty plan fits
    most = max(peak.num_bytes for peak in certificate.peaks)
    enough = replace(planner.cluster, device_memory_bytes=enough_bytes(most), node_memory_bytes=())
    larger = replace(plan, cluster=enough)
    fitting = replace(planner, cluster=enough).certificate(larger)
    shown = refusal(plan, certificate, [Remedy(f"devices of {byte_size(enough.device_memory_bytes)}", larger, fitting)])
    missing, within = byte_size(peak.num_bytes - peak.usable_bytes), byte_size(peak.usable_bytes)
    by = "more devices, larger ones, shorter rows, or smaller models"
    return PlanDoesNotFit(
        f"plan of {planner.graph.name}",
        f"{byte_size(peak.num_bytes)} on {peak.device} at {peak.node}",
        f"a plan within {within} of each device: {missing} less, by {by}",
        shown.report,
        shown.details,
    )


def _with_memory(problem: Problem, share: float) -> Problem:
    return replace(problem, device_bytes=tuple(int(size * share) for size in problem.device_bytes))


def _row(compared: Compared, best_seconds: float) -> dict[str, str]:
    if compared.estimate is None:
        return {"plan": compared.name, "seconds": "-", "against auto": "-", "note": compared.refused}
    seconds = compared.estimate.seconds
    return {
        "plan": compared.name,
        "seconds": f"{seconds:.3f}",
        "against auto": f"{seconds / best_seconds - 1:+.1%}",
        "note": "",
    }
