"""`plan: {1: auto, 41: plans/long.yaml}`: plans by step, all of them chosen and certified before the run starts."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from textwrap import indent
from typing import Any

from prefect_rlhf.errors.errors import InvalidInput, PlanDoesNotFit
from prefect_rlhf.files.yaml_text import read_yaml
from prefect_rlhf.flows.training.choice.auto_plan import AUTO
from prefect_rlhf.flows.training.choice.choose_plan import ChosenPlan, choose_plan, chosen_file
from prefect_rlhf.flows.training.choice.measured_plan import plans_to_measure
from prefect_rlhf.flows.training.request import RunRequest
from prefect_rlhf.placement.augmented.checkpointing import StepRange
from prefect_rlhf.placement.memory.bytes import byte_size
from prefect_rlhf.placement.memory.certificate import certify_plan
from prefect_rlhf.placement.memory.room import without_room
from prefect_rlhf.placement.memory.switch_memory import switch_loads
from prefect_rlhf.placement.plan import instances
from prefect_rlhf.placement.plans.plan_file import parse_plan, plan_yaml
from prefect_rlhf.placement.plans.presets import is_preset
from prefect_rlhf.placement.plans.stated_words import names_of
from prefect_rlhf.placement.plans.switch import closed_instances
from prefect_rlhf.tasks.checkpoints.folders import Checkpoint

PLANS_FILE = "plans.yaml"
"""The file of a run folder with the plans of a run by step; as `plan` of another run it repeats the switches."""

PlansByStep = Mapping[int, Any]
"""Step -> a plan's name or file, or the content of a plan file."""


@dataclass(frozen=True, slots=True)
class ChosenAt:
    """A chosen plan, and its first step."""

    step: int
    chosen: ChosenPlan


def plans_by_step(plan: str | Mapping[int, str]) -> PlansByStep | None:
    """Return the plans by step that the parameter `plan` states, itself or in a file; None for a single plan."""
    if not isinstance(plan, str):
        return plan
    if plan == AUTO or is_preset(plan) or not Path(plan).is_file() or plans_to_measure(plan):
        return None
    content = read_yaml("plan", Path(plan))
    if not isinstance(content, dict) or not content or not all(isinstance(step, int) for step in content):
        return None
    return content


def plan_in_words(plan: str | Mapping[int, str]) -> str:
    """Return the parameter `plan` in a short text.

    >>> plan_in_words("auto"), plan_in_words({1: "auto", 41: "plans/long.yaml"})
    ('auto', 'auto, long from 41')
    """
    if isinstance(plan, str):
        return plan
    first, *later = ((step, Path(name).stem) for step, name in plan.items())
    return ", ".join([first[1], *(f"{name} from {step}" for step, name in later)])


def choose_plans(request: RunRequest) -> tuple[ChosenAt, ...]:
    """Return the plans of a run by step: the plan of the parameter `plan`, or each plan of a list.

    Raises InvalidInput for a list with wrong steps, a plan that cannot run, or a switch that is not possible.
    """
    by_step = plans_by_step(request.options.plan)
    if by_step is None and request.options.replan == "switch" and request.checkpoint is not None:
        by_step = _made_until(request.checkpoint)
    if by_step is None:
        return (ChosenAt(1, choose_plan(request, _single(request.options.plan))),)
    check_steps(by_step, request)
    found = tuple(ChosenAt(step, _chosen(request, step, by_step[step])) for step in by_step)
    for before, after in pairwise(found):
        check_switch(request, before.chosen, after)
    return found


def in_effect(plans: Sequence[ChosenAt], finished: int) -> tuple[ChosenPlan, tuple[ChosenAt, ...]]:
    """Return the plan of a run that begins after `finished` steps, and the plans after it."""
    begun = max(index for index, each in enumerate(plans) if each.step <= finished + 1)
    return plans[begun].chosen, tuple(plans[begun + 1 :])


def check_steps(by_step: PlansByStep, request: RunRequest) -> None:
    """Raise InvalidInput unless the steps begin at 1, increase, end with the run, and permit a switch."""
    steps, seen = list(by_step), f"steps {', '.join(map(str, by_step))}"
    options, staleness = request.options, request.graph.staleness
    if not steps or steps[0] != 1:
        raise InvalidInput("plan", seen if steps else "no step", "plans by step that begin at step 1")
    if any(after <= before for before, after in pairwise(steps)):
        raise InvalidInput("plan", seen, "plans by step in increasing order of steps")
    if steps[-1] > options.steps:
        raise InvalidInput("plan", seen, f"steps up to {options.steps}, the number of steps of this run")
    run = StepRange(options.steps, every=options.checkpoint_every)
    for step in steps[1:]:
        if not run.can_switch(step - 1, staleness):
            every = options.checkpoint_every
            after = f"a switch after a checkpoint, at 1 + a multiple of {every} (checkpoint_every)"
            right = after if every else "no switch without checkpoint_every"
            raise InvalidInput(f"plan.{step}", f"a switch before step {step}", f"with staleness, {right}")


def check_switch(request: RunRequest, before: ChosenPlan, after: ChosenAt) -> None:
    """Raise InvalidInput for a switch that does not fit in host memory, or on a device beside the copies that stay."""
    certificates, graph = (before.certificate, after.chosen.certificate), request.graph
    seen = f"a switch from {before.plan.name} to {after.chosen.plan.name}"
    built = closed_instances(graph, after.chosen.plan, before.plan)
    kept = [instance for instance in instances(graph, after.chosen.plan) if instance not in built]
    fullest = certify_plan(after.chosen.plan, graph, request.workload, request.lease.kind, kept).fullest
    if fullest is not None and fullest.num_bytes > fullest.device_bytes:
        taken = f"{seen} that takes {byte_size(fullest.num_bytes)} of {fullest.device} at {fullest.node}"
        raise InvalidInput(f"plan.{after.step}", taken, f"at most {byte_size(fullest.device_bytes)}")
    for load in switch_loads(graph, before.plan, after.chosen.plan, certificates):
        if load.excess_bytes:
            taken = f"{seen} that keeps {byte_size(load.num_bytes)}"
            right = f"at most the {byte_size(load.host_bytes)} of the host of n{load.node} (host_memory_gib)"
            raise InvalidInput(f"plan.{after.step}", taken, right)


def plans_yaml(plans: Sequence[ChosenAt]) -> str:
    """Return the plans of a run as a file that repeats them."""
    return "".join(f"{each.step}:\n{indent(plan_yaml(each.chosen.plan), '  ')}" for each in plans)


def _chosen(request: RunRequest, step: int, plan: Any) -> ChosenPlan:
    """Return the plan at a step of a list; a mistake in it names the step."""
    field = f"plan.{step}"
    if isinstance(plan, str):
        if plans_to_measure(plan) or plans_by_step(plan) is not None:
            raise InvalidInput(field, plan, "auto, a preset's name or the file of a single plan")
        with _at(field, plan):
            return choose_plan(request, plan)
    if words := request.options.stated_words:
        call, word = min(names_of(words))
        raise InvalidInput(
            f"placement.{call}.{word}", words[call][word], f"no word beside {field}, which states a plan"
        )
    with _at(field, "this plan"):
        return chosen_file(request, parse_plan(plan, without_room(request.lease.cluster)))


def _made_until(checkpoint: Checkpoint) -> PlansByStep | None:
    """Return the plans of the run that wrote a checkpoint until then, if it switched by itself."""
    by_step = plans_by_step(str(checkpoint.folder.parent.parent / PLANS_FILE)) or {}
    return {step: plan for step, plan in by_step.items() if step <= checkpoint.step + 1} or None


@contextmanager
def _at(field: str, seen: str) -> Iterator[None]:
    """Name the step of a plan in the errors of the body. The table of a plan that does not fit stays."""
    try:
        yield
    except PlanDoesNotFit:
        raise
    except InvalidInput as error:
        raise InvalidInput(field, seen, f"a plan for this run ({error})") from error


def _single(plan: str | Mapping[int, str]) -> str:
    assert isinstance(plan, str)  # a list has another branch
    return plan
