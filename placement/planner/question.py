"""What every plan of one question is made and counted by: completed, aligned, certified, timed as augmented graph."""

from __future__ import annotations

from dataclasses import dataclass, replace

from prefect_rlhf.placement.augmented.augment import augment
from prefect_rlhf.placement.cost.sources import CostSources
from prefect_rlhf.placement.cost.workload import Workload
from prefect_rlhf.placement.graph import DataflowGraph
from prefect_rlhf.placement.layout.alignment import aligned
from prefect_rlhf.placement.lease import Backend
from prefect_rlhf.placement.memory.certificate import STEPS_CERTIFIED, Certificate, certify
from prefect_rlhf.placement.mesh import ClusterShape, Device, DeviceMesh
from prefect_rlhf.placement.plan import ExecutionPlan, Offload, Placement, instances
from prefect_rlhf.placement.planner.candidates import CostContext
from prefect_rlhf.placement.planner.mesh_space import MeshSpace
from prefect_rlhf.placement.planner.plan_problem import PlanProblem
from prefect_rlhf.placement.plans.check import check_plan
from prefect_rlhf.placement.plans.completion import completed
from prefect_rlhf.placement.schedule.estimate import Estimate, estimate, training
from prefect_rlhf.placement.search.driver import SearchResult


@dataclass(frozen=True, slots=True)
class Planner:
    """What every plan of one question is made and counted by."""

    graph: DataflowGraph
    cluster: ClusterShape
    mesh: DeviceMesh
    workload: Workload
    sources: CostSources
    kind: Backend

    def setting(self) -> CostContext:
        """Of the calls that run in every iteration."""
        line = MeshSpace.of(self.cluster, self.mesh, self.sources)
        return CostContext(training(self.graph), self.cluster, line, self.workload, self.sources, self.kind)

    def estimate(self, plan: ExecutionPlan) -> Estimate:
        """Its seconds, on its augmented graph."""
        return estimate(self.graph, plan, self.workload, self.sources)

    def certificate(self, plan: ExecutionPlan) -> Certificate:
        """Its bytes, evaluation included."""
        steps = self.graph.staleness + STEPS_CERTIFIED
        return certify(augment(self.graph, plan, steps), self.workload, self.kind)

    def fits(self, plan: ExecutionPlan) -> bool:
        """Whether its certificate says so."""
        return self.certificate(plan).fits

    def seconds(self, plan: ExecutionPlan) -> float:
        """Of one iteration of it."""
        return self.estimate(plan).seconds

    def plan(self, name: str, posed: PlanProblem, found: SearchResult) -> ExecutionPlan | None:
        """What a search found, as it would run; None where it found nothing."""
        if found.plan is None:
            return None
        chosen = posed.placements(found.plan)
        first = next(iter(chosen.values())).mesh.devices()[0]
        placements = completed(self.graph, chosen, self.mesh, first)
        plan = ExecutionPlan(name, self.cluster, _one_offload(self.graph, placements, self.cluster))
        return aligned(check_plan(plan, self.graph, self.mesh), self.graph)

    def fitting_plan(self, name: str, posed: PlanProblem, found: SearchResult) -> ExecutionPlan | None:
        """The same; None as well where it does not fit."""
        plan = self.plan(name, posed, found)
        return plan if plan is not None and self.fits(plan) else None

    def with_computations(self, plan: ExecutionPlan) -> tuple[ExecutionPlan, Estimate]:
        """The plan with its computations on the device, of the first of each mesh, where the iteration is shortest."""
        firsts = dict.fromkeys(placement.mesh.devices()[0] for _, placement in plan.placements)
        timed = [(moved, self.estimate(moved)) for moved in (_computing_on(device, plan) for device in firsts)]
        return min(timed, key=lambda pair: pair[1].seconds)


def _computing_on(device: Device, plan: ExecutionPlan) -> ExecutionPlan:
    mesh = DeviceMesh(device.node, 1, device.index, 1)
    moved = ((name, replace(old, mesh=mesh) if old.engine == "python" else old) for name, old in plan.placements)
    return replace(plan, placements=tuple(moved))


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
