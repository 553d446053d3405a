"""The plan that the parameter `plan` names: a searched or measured plan, a preset, or a plan file."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from prefect_rlhf.flows.training.choice.auto_plan import AUTO, auto_plan, search_plan
from prefect_rlhf.flows.training.choice.measured_plan import PlanTrial, fastest, measure, plans_to_measure
from prefect_rlhf.flows.training.log import log_info
from prefect_rlhf.flows.training.request import RunRequest
from prefect_rlhf.placement.layout.alignment import aligned
from prefect_rlhf.placement.memory.certificate import Certificate
from prefect_rlhf.placement.memory.fit import check_fits
from prefect_rlhf.placement.plan import ExecutionPlan
from prefect_rlhf.placement.planner.explain import next_best
from prefect_rlhf.placement.planner.preset_plan import preset
from prefect_rlhf.placement.plans.check import check_plan
from prefect_rlhf.placement.plans.plan_file import read_plan
from prefect_rlhf.placement.plans.presets import is_preset


@dataclass(frozen=True, slots=True)
class ChosenPlan:
    """The plan of a run, checked and aligned, with its certificate and, for `measure(k)`, the trials of the k plans."""

    plan: ExecutionPlan
    certificate: Certificate
    trials: Sequence[PlanTrial] = ()


def choose_plan(request: RunRequest, name: str) -> ChosenPlan:
    """Return the plan of that name: searched (`auto`), the fastest of `measure(k)`, a preset, or a plan file.

    If a plan states no order of devices, copies of trained weights get the order that moves the fewest bytes. A dry run
    does not measure: it uses the plan that would be measured first. Raises InvalidInput for a plan that cannot run.
    """
    graph, lease, workload = request.graph, request.lease, request.workload
    if name == AUTO:
        return ChosenPlan(*auto_plan(request.question, log_info))
    trials: Sequence[PlanTrial] = ()
    if count := plans_to_measure(name):
        plans = best_plans(request, 1 if request.options.dry_run else count)
        trials = () if request.options.dry_run else measure(request, plans)
        plan = fastest(trials) if trials else plans[0]
        return ChosenPlan(plan, check_fits(plan, graph, workload, lease.kind), trials)
    if is_preset(name) or (name.isidentifier() and not Path(name).exists()):  # raises with the list of presets
        return chosen_file(request, preset(name, graph, lease.cluster, lease.mesh, workload.longest, lease.kind))
    return chosen_file(request, read_plan(Path(name), lease.cluster))


def chosen_file(request: RunRequest, plan: ExecutionPlan) -> ChosenPlan:
    """Return a preset or the plan of a file, checked, aligned and certified. Raises InvalidInput if it cannot run."""
    graph, lease = request.graph, request.lease
    plan = aligned(check_plan(plan, graph, lease.mesh), graph)
    return ChosenPlan(plan, check_fits(plan, graph, request.workload, lease.kind))


def best_plans(request: RunRequest, count: int) -> list[ExecutionPlan]:
    """Return up to `count` plans of a search, best first."""
    plans = next_best(request.question, search_plan(request.question, log_info), count)
    if len(plans) < count:
        log_info(f"measure({count}): only {len(plans)} different plans are known")
    return plans
