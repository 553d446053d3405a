"""Finds the plan that a run asks for: searched, measured, a preset, or a plan file."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import assert_never

from prefect_rlhf.errors.errors import InvalidInput
from prefect_rlhf.flows.training.choice.auto_plan import auto_plan, search_plan
from prefect_rlhf.flows.training.choice.measured_plan import PlanTrial, fastest, measure
from prefect_rlhf.flows.training.log import log_info
from prefect_rlhf.flows.training.request import RunRequest
from prefect_rlhf.flows.training.spec.plan_choice import (
    Auto,
    Measure,
    PlanContent,
    PlanFile,
    PresetPlan,
    SinglePlan,
)
from prefect_rlhf.placement.layout.alignment import aligned
from prefect_rlhf.placement.memory.certificate import Certificate
from prefect_rlhf.placement.memory.fit import check_fits
from prefect_rlhf.placement.memory.room import without_room
from prefect_rlhf.placement.plan import ExecutionPlan
from prefect_rlhf.placement.planner.explain import next_best
from prefect_rlhf.placement.planner.preset_plan import completed_preset
from prefect_rlhf.placement.plans.check import check_plan
from prefect_rlhf.placement.plans.plan_file import parse_plan, read_plan
from prefect_rlhf.placement.plans.stated_words import NO_WORDS, Words, as_stated, names_of, with_words


@dataclass(frozen=True, slots=True)
class ChosenPlan:
    """The plan of a run, checked and aligned, with its certificate and, for `measure(k)`, the trials of the k plans."""

    plan: ExecutionPlan
    certificate: Certificate
    trials: Sequence[PlanTrial] = ()


def choose_plan(request: RunRequest, choice: SinglePlan) -> ChosenPlan:
    """Return the plan of a choice: searched (`auto`), the fastest of `measure(k)`, a preset, or a plan file.

    Words stated in the parameter `placement` hold in a completed preset and in a search, and replace those in a plan
    file. A plan file may use the headroom that other plans keep free. If a plan states no order of devices, copies of
    trained weights get the order that moves the fewest bytes. A dry run does not measure: it uses the plan that would
    be measured first. Raises InvalidInput for a plan that cannot run.
    """
    graph, lease, words = request.graph, request.lease, request.spec.words
    match choice:
        case Measure() if words:
            raise measured_beside(words, choice)
        case Auto():
            return ChosenPlan(*auto_plan(request.question, log_info, words))
        case Measure(count):
            return measured_choice(request, count)
        case PresetPlan(name):
            plan = completed_preset(name, graph, lease.cluster, lease.mesh, request.workload, lease.kind, words)
            return chosen_file(request, plan)
        case PlanFile(path):
            return chosen_file(request, read_plan(path, without_room(lease.cluster)), words)
        case PlanContent(content):
            return chosen_file(request, parse_plan(content, without_room(lease.cluster)))
        case _:
            assert_never(choice)


def measured_choice(request: RunRequest, count: int) -> ChosenPlan:
    """Run each of the `count` best plans and return the fastest; a dry run returns the best without measuring."""
    plans = best_plans(request, 1 if request.spec.dry_run else count)
    trials = () if request.spec.dry_run else measure(request, plans)
    plan = fastest(trials) if trials else plans[0]
    return ChosenPlan(plan, check_fits(plan, request.graph, request.workload, request.lease.kind), trials)


def measured_beside(words: Words, choice: Measure) -> InvalidInput:
    """Return the error for stated words combined with measuring: a search's plans already differ in their words."""
    call, word = sorted(names_of(words))[0]
    right = f"no value with plan: {choice}, which chooses it; set plan to auto, a preset or a plan file"
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
