"""A planning question: the graph, the site where it would run, and the lengths of its rows.

For every question, a plan is completed, aligned, certified and timed in the same way, on its augmented graph.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace

from prefect_rlhf.placement.cost.sources import CostSources
from prefect_rlhf.placement.cost.times.profile import Profile
from prefect_rlhf.placement.cost.workload import Workload
from prefect_rlhf.placement.devices.lease import Lease
from prefect_rlhf.placement.devices.mesh import Backend, ClusterShape, DeviceMesh
from prefect_rlhf.placement.graph import DataflowGraph
from prefect_rlhf.placement.layout.alignment import aligned
from prefect_rlhf.placement.layout.sharing import one_base
from prefect_rlhf.placement.memory.certificate import Certificate, certify_plan
from prefect_rlhf.placement.memory.savings import with_changes
from prefect_rlhf.placement.plan import ExecutionPlan, Offload, Placement, instances
from prefect_rlhf.placement.plans.check import check_plan, sleepless
from prefect_rlhf.placement.plans.completion import completed
from prefect_rlhf.placement.schedule.estimate import Estimate, estimate


@dataclass(frozen=True, slots=True)
class Site:
    """Where a plan would run: the part `mesh` of a cluster, and the sources of its costs."""

    cluster: ClusterShape
    mesh: DeviceMesh
    sources: CostSources
    backend: Backend = "cuda"

    def __post_init__(self) -> None:
        object.__setattr__(self, "cluster", replace(self.cluster, backend=self.backend, leased=self.mesh))

    @classmethod
    def of_lease(cls, lease: Lease, sources: CostSources) -> Site:
        """Return the site of a run with this lease."""
        return cls(lease.cluster, lease.mesh, sources, lease.kind)

    def with_profiles(self, profiles: Iterable[Profile]) -> Site:
        """Return the site with measured times."""
        return replace(self, sources=replace(self.sources, profiles=tuple(profiles)))


@dataclass(frozen=True, slots=True)
class Question:
    """A planning question: the best plan of `graph` on `site`, for rows with the lengths of `workload`."""

    graph: DataflowGraph
    site: Site
    workload: Workload
    _seconds: dict[object, float] = field(default_factory=dict, init=False, repr=False, compare=False)
    _certificates: dict[object, Certificate] = field(default_factory=dict, init=False, repr=False, compare=False)

    def plan(self, name: str, chosen: Mapping[str, Placement]) -> ExecutionPlan:
        """Return the plan that places model calls as `chosen`: completed, checked and aligned.

        Computations run on the first device of the first train_step, which reads their results. On a generate's device
        they would wait for the rows of the next step. Raises InvalidInput for an illegal plan.
        """
        trained = [chosen[call.name] for call in self.graph if call.kind == "train_step" and call.name in chosen]
        first = next(iter((*trained, *chosen.values()))).mesh.devices()[0]
        placements = completed(self.graph, chosen, self.site.mesh, first, self.site.backend)
        plan = with_copies_agreed(ExecutionPlan(name, self.site.cluster, placements), self.graph)
        return aligned(check_plan(plan, self.graph, self.site.mesh), self.graph)

    def estimate(self, plan: ExecutionPlan) -> Estimate:
        """Time a plan on its augmented graph."""
        return estimate(self.graph, plan, self.workload, self.site.sources)

    def seconds(self, plan: ExecutionPlan) -> float:
        """Return the iteration time in seconds, which is computed once per plan."""
        key = plan.cluster, plan.placements
        if key not in self._seconds:
            self._seconds[key] = self.estimate(plan).seconds
        return self._seconds[key]

    def certificate(self, plan: ExecutionPlan) -> Certificate:
        """Count a plan's bytes, including evaluation; once for plans that differ only in name."""
        key = plan.cluster, plan.cluster.kept_share, plan.placements
        if key not in self._certificates:
            self._certificates[key] = certify_plan(plan, self.graph, self.workload, self.site.backend)
        return replace(self._certificates[key], plan=plan.name)

    def fits(self, plan: ExecutionPlan) -> bool:
        """Whether the plan's certificate says that it fits."""
        return self.certificate(plan).fits


def with_copies_agreed(plan: ExecutionPlan, graph: DataflowGraph) -> ExecutionPlan:
    """Return the plan in which each copy of weights is offloaded as much as any of its calls requests.

    If only one copy may leave a device, the first does. Copies that share a base stay, unless all of them leave. A copy
    has the largest cache that any of its calls requests.
    """
    strength: dict[Offload, int] = {"none": 0, "optimizer": 1, "all": 2}
    for calls in instances(graph, plan).values():
        offload = max((plan[call.name].offload for call in calls), key=strength.__getitem__)
        prefetch = offload == "none" or all(plan[call.name].prefetch for call in calls)
        caches = [plan[call.name].cache_gib for call in calls]
        cache_gib = None if None in caches else max(cache for cache in caches if cache is not None)
        plan = with_changes(plan, calls, offload=offload, prefetch=prefetch, cache_gib=cache_gib)
    for calls in sleepless(plan, graph):
        plan = with_changes(plan, calls, offload="none", prefetch=True)
    for alike in one_base(graph, plan):
        users = instances(graph, plan)
        away = [users[instance] for instance in alike if plan[users[instance][0].name].offload == "all"]
        for calls in away if len(away) < len(alike) else ():
            trains = any(call.kind == "train_step" for call in calls)
            plan = with_changes(plan, calls, offload="optimizer" if trains else "none", prefetch=True)
    return plan
