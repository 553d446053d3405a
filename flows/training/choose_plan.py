"""Which plan the parameter `plan` names: one that is searched, a preset, or a file."""

from __future__ import annotations

from pathlib import Path

from prefect_rlhf.flows.hardware.profiles import measured_sources
from prefect_rlhf.flows.training.auto_plan import AUTO, auto_plan, search_plan
from prefect_rlhf.flows.training.log import log_info
from prefect_rlhf.flows.training.measured_plan import plans_to_measure
from prefect_rlhf.placement.cost.workload import Workload
from prefect_rlhf.placement.graph import DataflowGraph
from prefect_rlhf.placement.layout.alignment import aligned
from prefect_rlhf.placement.lease import Lease
from prefect_rlhf.placement.plan import ExecutionPlan
from prefect_rlhf.placement.planner.next_best import next_best
from prefect_rlhf.placement.planner.preset_plan import preset
from prefect_rlhf.placement.planner.question import Planner
from prefect_rlhf.placement.plans.check import check_plan
from prefect_rlhf.placement.plans.plan_file import read_plan
from prefect_rlhf.placement.plans.presets import is_preset


def choose_plan(name: str, graph: DataflowGraph, held: Lease, workload: Workload) -> ExecutionPlan:
    """The searched plan (`auto`), the preset of that name, or the plan in that file; checked against graph, models and
    lease. Of `measure(k)`, the one that would be measured first.

    Where it states no order of devices, copies of trained weights get the one that moves the least.
    """
    cluster = held.cluster
    if plans_to_measure(name):
        plan = best_plans(graph, held, workload, 1)[0]
    elif name == AUTO:
        plan = auto_plan(graph, held, workload, log_info)
    elif is_preset(name):
        plan = preset(name, graph, cluster, held.mesh, workload.longest, held.kind)
    else:
        plan = read_plan(Path(name), cluster)
    return aligned(check_plan(plan, graph, held.mesh), graph)


def best_plans(graph: DataflowGraph, held: Lease, workload: Workload, count: int) -> list[ExecutionPlan]:
    """The best plans that a search knows."""
    sources = measured_sources(graph.models, held)
    planner = Planner(graph, held.cluster, held.mesh, workload, sources, held.kind)
    return next_best(planner, search_plan(graph, held, workload, sources, log_info), count)
