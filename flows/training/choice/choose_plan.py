"""The plan that the parameter `plan` names: a searched or measured plan, a preset, or a plan file."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from prefect_rlhf.errors.errors import InvalidInput
from prefect_rlhf.flows.training.choice.auto_plan import AUTO, auto_plan, search_plan
from prefect_rlhf.flows.training.choice.measured_plan import PlanTrial, fastest, measure, plans_to_measure
from prefect_rlhf.flows.training.log import log_info
from prefect_rlhf.flows.training.request import RunRequest
from prefect_rlhf.placement.layout.alignment import aligned
from prefect_rlhf.placement.memory.certificate import Certificate
from prefect_rlhf.placement.memory.fit import check_fits
from prefect_rlhf.placement.memory.room import without_room
from prefect_rlhf.placement.plan import ExecutionPlan
from prefect_rlhf.placement.planner.explain import next_best
from prefect_rlhf.placement.planner.preset_plan import completed_preset
from prefect_rlhf.placement.plans.check import check_plan
from prefect_rlhf.placement.plans.plan_file import read_plan
from prefect_rlhf.placement.plans.presets import is_preset
from prefect_rlhf.placement.plans.stated_words import NO_WORDS, Words, as_stated, names_of, with_words


@dataclass(frozen=True, slots=True)
class ChosenPlan:
    """The plan of a run, checked and aligned, with its certificate and, for `measure(k)`, the trials of the k plans."""

    plan: ExecutionPlan
    certificate: Certificate
    trials: Sequence[PlanTrial] = ()


def choose_plan(request: RunRequest, name: str) -> ChosenPlan:
    """Return the plan of that name: searched (`auto`), the fastest of `measure(k)`, a preset, or a plan file.

    A preset is completed, and keeps the words of the parameter `placement`, as `auto` does; in the plan of a file they
    replace the file's. A file's plan may fill the room that others keep. If a plan states no order of devices, copies
    of trained weights get the order that moves the fewest bytes. A dry run does not measure: it uses the plan that
    would be measured first. Raises InvalidInput for a plan that cannot run.
    """
    graph, lease, workload = request.graph, request.lease, request.workload
    words = request.options.stated_words
    if words and plans_to_measure(name):
        raise measured_beside(words, name)
    if name == AUTO:
        return ChosenPlan(*auto_plan(request.question, log_info, words))
    trials: Sequence[PlanTrial] = ()
    if count := plans_to_measure(name):
        plans = best_plans(request, 1 if request.options.dry_run else count)
        trials = () if request.options.dry_run else measure(request, plans)
        plan = fastest(trials) if trials else plans[0]
        return ChosenPlan(plan, check_fits(plan, graph, workload, lease.kind), trials)
    if is_preset(name) or (name.isidentifier() and not Path(name).exists()):  # raises with the list of presets
        plan = completed_preset(name, graph, lease.cluster, lease.mesh, workload, lease.kind, words)
        return chosen_file(request, plan)
    return chosen_file(request, read_plan(Path(name), without_room(lease.cluster)), words)


def measured_beside(words: Words, name: str) -> InvalidInput:
    """Return the error for stated words beside plans of a search that are measured, which differ in their words."""
    call, word = sorted(names_of(words))[0]
    right = f"no word beside plan: {name}, which chooses every word; set plan to auto, a preset or a plan file"
    return InvalidInput(f"placement.{call}.{word}", words[call][word], right)


def chosen_file(request: RunRequest, plan: ExecutionPlan, words: Words = NO_WORDS) -> ChosenPlan:
    """Return a preset or the plan of a file, checked, aligned and certified. Raises InvalidInput if it cannot run.

    The stated words replace those of the plan.
    """
    graph, lease = request.graph, request.lease
    try:
        plan = aligned(check_plan(with_words(plan, graph, words), graph, lease.mesh), graph)
    except InvalidInput as error:
        raise as_stated(error, words) from error
    return ChosenPlan(plan, check_fits(plan, graph, request.workload, lease.kind))


def best_plans(request: RunRequest, count: int) -> list[ExecutionPlan]:
    """Return up to `count` plans of a search, best first."""
    plans = next_best(request.question, search_plan(request.question, log_info), count)
    if len(plans) < count:
        log_info(f"measure({count}): only {len(plans)} different plans are known")
    return plans
