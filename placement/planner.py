"""From a graph to the best plan that a search finds, how good it can be at most, and what the presets would take.

The search solves `plan_problem`. What it finds is completed, aligned, certified, and timed on its augmented graph, as
are the presets; the fastest of all of them is the plan. The bound is the search's.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

from prefect_rlhf.placement.alignment import aligned
from prefect_rlhf.placement.augment import augment
from prefect_rlhf.placement.candidates import Setting
from prefect_rlhf.placement.certificate import Certificate, certify, usable_bytes
from prefect_rlhf.placement.check import check_plan
from prefect_rlhf.placement.completion import completed
from prefect_rlhf.placement.cost.sources import CostSources
from prefect_rlhf.placement.cost.workload import Workload
from prefect_rlhf.placement.errors import InvalidInput, RlhfError
from prefect_rlhf.placement.estimate import ITERATIONS, Estimate, estimate, training
from prefect_rlhf.placement.fit import STEPS_CERTIFIED
from prefect_rlhf.placement.graph import DataflowGraph
from prefect_rlhf.placement.instances import instances
from prefect_rlhf.placement.lease import DeviceKind
from prefect_rlhf.placement.mesh import ClusterShape, DeviceMesh
from prefect_rlhf.placement.mesh_line import MeshLine
from prefect_rlhf.placement.plan import ExecutionPlan, Offload, Placement
from prefect_rlhf.placement.plan_problem import PlanProblem, plan_problem
from prefect_rlhf.placement.presets import PRESETS, preset
from prefect_rlhf.placement.search.driver import Method, Progress, SearchResult, search
from prefect_rlhf.placement.search.problem import Problem

MEMORY_SHARES = (1.0, 0.9, 0.8, 0.7, 0.6, 0.5)
"""Of a device, tried one after the other: a problem does not count what only a certificate knows."""


@dataclass(frozen=True, slots=True)
class Compared:
    """A plan by a name that people know: its estimate, or why there is none."""

    name: str
    estimate: Estimate | None = None
    refused: str = ""


@dataclass(frozen=True, slots=True)
class Planned:
    """`lower_bound_seconds`: no plan of the whole space takes less per iteration. `binding` says why, in words."""

    plan: ExecutionPlan
    estimate: Estimate
    certificate: Certificate
    lower_bound_seconds: float
    binding: str
    search: SearchResult
    presets: tuple[Compared, ...]

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
        every = (Compared(self.plan.name, self.estimate), *self.presets)
        return [_row(compared, self.seconds) for compared in every]


@dataclass(frozen=True, slots=True)
class Planner:
    """What every plan of one question is counted by."""

    graph: DataflowGraph
    cluster: ClusterShape
    mesh: DeviceMesh
    workload: Workload
    sources: CostSources
    kind: DeviceKind

    def setting(self) -> Setting:
        """Of the calls that run in every iteration."""
        line = MeshLine.of(self.cluster, self.mesh, self.sources)
        usable = usable_bytes(self.cluster.device_memory_bytes)
        return Setting(training(self.graph), line, self.workload, self.sources, usable, self.kind)

    def estimate(self, plan: ExecutionPlan) -> Estimate:
        return estimate(self.graph, plan, self.workload, self.sources)

    def certificate(self, plan: ExecutionPlan) -> Certificate:
        steps = self.graph.staleness + STEPS_CERTIFIED
        return certify(augment(self.graph, plan, steps), self.workload, self.kind)

    def checked(self, placements: tuple[tuple[str, Placement], ...]) -> ExecutionPlan:
        """A plan as it would run."""
        plan = ExecutionPlan("auto", self.cluster, _one_offload(self.graph, placements, self.cluster))
        return aligned(check_plan(plan, self.graph, self.mesh), self.graph)

    def plans(self, posed: PlanProblem, found: SearchResult) -> Iterator[ExecutionPlan]:
        """What the search found, with computations on the first device of each mesh."""
        if found.plan is None:
            return
        chosen: dict[str, Placement] = {}
        for name, choice in found.plan.items():
            mesh = DeviceMesh.parse(posed.problem.meshes[choice.mesh].label)
            chosen[name] = replace(posed.candidates[name][choice.option].placement, mesh=mesh)
        for device in dict.fromkeys(placement.mesh.devices()[0] for placement in chosen.values()):
            yield self.checked(completed(self.graph, chosen, self.mesh, device))

    def preset(self, name: str) -> Compared:
        try:
            plan = preset(name, self.graph, self.cluster, self.mesh, self.workload.longest, self.kind)
            return Compared(name, self.estimate(aligned(plan, self.graph)))
        except RlhfError as error:
            return Compared(name, refused=str(error).splitlines()[0])


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
) -> Planned:
    """The best plan of `graph` on the leased `mesh` that was found within about `budget_seconds` of search.

    Raises InvalidInput for a budget that is not positive, a mesh outside the cluster, and when no plan fits.
    """
    if not budget_seconds > 0:
        raise InvalidInput("budget_seconds", budget_seconds, "more than 0 seconds")
    cluster.check_mesh(mesh)
    planner = Planner(graph, cluster, mesh, workload, sources, kind)
    posed = plan_problem(planner.setting(), ITERATIONS)
    first = search(posed.problem, budget_seconds, method, progress=progress)
    plan, made = _fastest_that_fits(planner, posed, first, budget_seconds, method)
    presets = tuple(planner.preset(name) for name in PRESETS)
    for compared in presets:
        if compared.estimate is not None and compared.estimate.seconds < made.seconds:
            plan = replace(_of_preset(planner, compared.name), name="auto")
            made = planner.estimate(plan)
    bound = min(first.lower_bound_seconds / ITERATIONS, made.seconds)
    return Planned(plan, made, planner.certificate(plan), bound, first.binding, first, presets)


def _fastest_that_fits(
    planner: Planner, posed: PlanProblem, first: SearchResult, budget_seconds: float, method: Method
) -> tuple[ExecutionPlan, Estimate]:
    """Of what the search finds; with less memory to fill, where that does not fit."""
    for share in MEMORY_SHARES:
        found = first if share == 1.0 else search(_with_less(posed.problem, share), budget_seconds, method)
        if not _lies_right(posed.problem, found):
            found = search(_with_less(posed.problem, share), budget_seconds, "metropolis-hastings")
        fitting = [plan for plan in planner.plans(posed, found) if planner.certificate(plan).fits]
        if fitting:
            timed = [(plan, planner.estimate(plan)) for plan in fitting]
            return min(timed, key=lambda pair: pair[1].seconds)
    raise InvalidInput("plan", "auto", f"a cluster that {planner.graph.name} fits: no plan of {planner.mesh.name} does")


def _lies_right(problem: Problem, found: SearchResult) -> bool:
    """Whether every mesh is one that its option runs on. The exact search does not lay out its first call's yet."""
    options = {call.name: call.options for call in problem.calls}
    chosen = (found.plan or {}).items()
    return all(c.mesh in problem.mesh_classes[options[name][c.option].mesh_class] for name, c in chosen)


def _with_less(problem: Problem, share: float) -> Problem:
    return replace(problem, device_bytes=tuple(int(size * share) for size in problem.device_bytes))


def _of_preset(planner: Planner, name: str) -> ExecutionPlan:
    found = preset(name, planner.graph, planner.cluster, planner.mesh, planner.workload.longest, planner.kind)
    return aligned(found, planner.graph)


def _one_offload(
    graph: DataflowGraph, placements: tuple[tuple[str, Placement], ...], cluster: ClusterShape
) -> tuple[tuple[str, Placement], ...]:
    """Calls that share a copy of weights agree on what of it leaves the device: the most that any of them asks for."""
    strength: dict[Offload, int] = {"none": 0, "optimizer": 1, "all": 2}
    placed = dict(placements)
    for calls in instances(graph, ExecutionPlan("auto", cluster, placements)).values():
        most = max((placed[call.name].offload for call in calls), key=strength.__getitem__)
        for call in calls:
            placed[call.name] = replace(placed[call.name], offload=most)
    return tuple(placed.items())


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
