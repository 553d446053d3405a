"""The plan that the parameter `plan` names: one that is searched, a preset, or a file."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from prefect_rlhf.flows.training.auto_plan import AUTO, ChosenPlan, auto_plan, search_plan
from prefect_rlhf.flows.training.log import log_info
from prefect_rlhf.flows.training.measured_plan import plans_to_measure
from prefect_rlhf.placement.cost.sources import CostSources
from prefect_rlhf.placement.cost.workload import Workload
from prefect_rlhf.placement.graph import DataflowGraph
from prefect_rlhf.placement.layout.alignment import aligned
from prefect_rlhf.placement.lease import Lease
from prefect_rlhf.placement.memory.fit import check_fits
from prefect_rlhf.placement.plan import ExecutionPlan
from prefect_rlhf.placement.planner.next_best import next_best
from prefect_rlhf.placement.planner.preset_plan import preset
from prefect_rlhf.placement.planner.question import Question, Site
from prefect_rlhf.placement.plans.check import check_plan
from prefect_rlhf.placement.plans.plan_file import read_plan
from prefect_rlhf.placement.plans.presets import is_preset


def choose_plan(
    name: str, graph: DataflowGraph, leased: Lease, workload: Workload, sources: Callable[[], CostSources]
) -> ChosenPlan:
    """Return the searched plan (`auto`), the preset of that name, or the plan in that file, proven to fit the lease.

    Of `measure(k)` it is the one that would be measured first. Where a plan states no order of devices, copies of
    trained weights get the one that moves the least. Only searches ask for `sources`.
    """
    if name == AUTO:
        return auto_plan(Question(graph, Site.of_lease(leased, sources()), workload), log_info)
    if plans_to_measure(name):
        plan = best_plans(Question(graph, Site.of_lease(leased, sources()), workload), 1)[0]
    else:
        if is_preset(name):
            plan = preset(name, graph, leased.cluster, leased.mesh, workload.longest, leased.kind)
        else:
            plan = read_plan(Path(name), leased.cluster)
        plan = aligned(check_plan(plan, graph, leased.mesh), graph)
    return ChosenPlan(plan, check_fits(plan, graph, workload, leased.kind))


def best_plans(question: Question, count: int) -> list[ExecutionPlan]:
    """Return up to `count` plans, the best that a search knows first."""
    return next_best(question, search_plan(question, log_info), count)
