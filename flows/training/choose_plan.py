"""The plan that the parameter `plan` names: one that is searched or measured, a preset, or a file."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from prefect_rlhf.flows.training.auto_plan import AUTO, auto_plan, search_plan
from prefect_rlhf.flows.training.log import log_info
from prefect_rlhf.flows.training.measured_plan import PlanTrial, fastest, measure, plans_to_measure
from prefect_rlhf.flows.training.request import RunRequest
from prefect_rlhf.placement.layout.alignment import aligned
from prefect_rlhf.placement.memory.certificate import Certificate
from prefect_rlhf.placement.memory.fit import check_fits
from prefect_rlhf.placement.plan import ExecutionPlan
from prefect_rlhf.placement.planner.next_best import next_best
from prefect_rlhf.placement.planner.preset_plan import preset
from prefect_rlhf.placement.plans.check import check_plan
from prefect_rlhf.placement.plans.plan_file import read_plan
from prefect_rlhf.placement.plans.presets import is_preset


@dataclass(frozen=True, slots=True)
class ChosenPlan:
    """The plan of a run, checked and aligned, and the proof that it fits; for `measure(k)` also how the k plans ran."""

    plan: ExecutionPlan
    certificate: Certificate
    trials: Sequence[PlanTrial] = ()


def choose_plan(request: RunRequest) -> ChosenPlan:
    """Return the plan that was asked for: searched (`auto`), the fastest of `measure(k)`, a preset, or that of a file.

    Where a plan states no order of devices, copies of trained weights get the one that moves the least. A dry run
    measures nothing: it takes the plan that would be measured first. Raises InvalidInput for a plan that cannot run.
    """
    name, graph, lease, workload = request.options.plan, request.graph, request.lease, request.workload
    if name == AUTO:
        return ChosenPlan(*auto_plan(request.question, log_info))
    trials: Sequence[PlanTrial] = ()
    if count := plans_to_measure(name):
        plans = best_plans(request, 1 if request.options.dry_run else count)
        trials = () if request.options.dry_run else measure(request, plans)
        plan = fastest(trials) if trials else plans[0]
    else:
        if is_preset(name) or (name.isidentifier() and not Path(name).exists()):  # another word is told the presets
            plan = preset(name, graph, lease.cluster, lease.mesh, workload.longest, lease.kind)
        else:
            plan = read_plan(Path(name), lease.cluster)
        plan = aligned(check_plan(plan, graph, lease.mesh), graph)
    return ChosenPlan(plan, check_fits(plan, graph, workload, lease.kind), trials)


def best_plans(request: RunRequest, count: int) -> list[ExecutionPlan]:
    """Return up to `count` plans, the best that a search knows first."""
    plans = next_best(request.question, search_plan(request.question, log_info), count)
    if len(plans) < count:
        log_info(f"{request.options.plan}: there are no more than {len(plans)} different plans to measure")
    return plans
