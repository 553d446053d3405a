"""A run's plans by step: all of them are chosen and certified before the run starts."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from textwrap import indent

from prefect_rlhf.errors.errors import InvalidInput, PlanDoesNotFit
from prefect_rlhf.flows.training.choice.choose_plan import ChosenPlan, choose_plan
from prefect_rlhf.flows.training.request import RunRequest
from prefect_rlhf.flows.training.spec.plan_choice import PlanContent, PlansByStep, SinglePlan, read_plans_by_step
from prefect_rlhf.flows.training.spec.replanning import Switch
from prefect_rlhf.placement.augmented.checkpointing import StepRange
from prefect_rlhf.placement.memory.bytes import byte_size
from prefect_rlhf.placement.memory.certificate import certify_plan
from prefect_rlhf.placement.memory.switch_memory import switch_loads
from prefect_rlhf.placement.plan import instances
from prefect_rlhf.placement.plans.plan_file import plan_yaml
from prefect_rlhf.placement.plans.stated_words import names_of
from prefect_rlhf.placement.plans.switch import closed_instances
from prefect_rlhf.tasks.checkpoints.folders import Checkpoint

PLANS_FILE = "plans.yaml"
"""The run folder's file with its plans by step; as another run's `plan` it repeats the switches."""


@dataclass(frozen=True, slots=True)
class ChosenAt:
    """A chosen plan, and its first step."""

    step: int
    chosen: ChosenPlan


def choose_plans(request: RunRequest) -> tuple[ChosenAt, ...]:
    """Return the plans of a run by step: a single plan, or each plan of a list.

    Raises InvalidInput for a list with wrong steps, a plan that cannot run, or a switch that is not possible.
    """
    choice = request.spec.plan
    if isinstance(request.spec.replanning, Switch) and request.checkpoint is not None:
        choice = _made_until(request.checkpoint) or choice
    if not isinstance(choice, PlansByStep):
        return (ChosenAt(1, choose_plan(request, choice)),)
    check_steps(choice, request)
    found = tuple(ChosenAt(step, _chosen(request, step, plan)) for step, plan in choice.plans)
    for before, after in pairwise(found):
        check_switch(request, before.chosen, after)
    return found


def in_effect(plans: Sequence[ChosenAt], finished: int) -> tuple[ChosenPlan, tuple[ChosenAt, ...]]:
    """Return the plan that applies after `finished` steps, and the plans that follow."""
    begun = max(index for index, each in enumerate(plans) if each.step <= finished + 1)
    return plans[begun].chosen, tuple(plans[begun + 1 :])


def check_steps(choice: PlansByStep, request: RunRequest) -> None:
    """Raise InvalidInput unless steps begin at 1, increase, stay below the run's end, and permit a switch."""
    steps, spec, staleness = [step for step, _ in choice.plans], request.spec, request.graph.staleness
    seen = f"steps {', '.join(map(str, steps))}"
    if not steps or steps[0] != 1:
        raise InvalidInput(
            "plan", seen if steps else "no step", "steps that begin at 1, such as {1: flattening, 6: auto}"
        )
    if any(after <= before for before, after in pairwise(steps)):
        raise InvalidInput("plan", seen, "steps in increasing order")
    if steps[-1] > spec.steps:
        raise InvalidInput("plan", seen, f"steps up to {spec.steps}, the number of steps of this run")
    run = StepRange(spec.steps, every=spec.checkpoint_every)
    for step in steps[1:]:
        if not run.can_switch(step - 1, staleness):
            every = spec.checkpoint_every
            after = f"a switch after a checkpoint, at 1 + a multiple of {every} (checkpoint_every)"
            right = after if every else "no switch without checkpoint_every"
            raise InvalidInput(f"plan.{step}", f"a switch before step {step}", f"with staleness, {right}")


def check_switch(request: RunRequest, before: ChosenPlan, after: ChosenAt) -> None:
    """Raise InvalidInput if a switch exceeds host memory, or the memory of a device next to the copies that stay."""
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
            right = f"at most {byte_size(load.host_bytes)}, the memory of n{load.node}'s host (host_memory_gib)"
            raise InvalidInput(f"plan.{after.step}", taken, right)


def plans_yaml(plans: Sequence[ChosenAt]) -> str:
    """Return a run's plans as a file that repeats them."""
    return "".join(f"{each.step}:\n{indent(plan_yaml(each.chosen.plan), '  ')}" for each in plans)


def _chosen(request: RunRequest, step: int, plan: SinglePlan) -> ChosenPlan:
    """Return the plan at a step of a list; a mistake in it names the step."""
    field, words = f"plan.{step}", request.spec.words
    if words and isinstance(plan, PlanContent):
        call, word = min(names_of(words))
        right = f"no value: {field} states the whole plan, so change it there"
        raise InvalidInput(f"placement.{call}.{word}", words[call][word], right)
    with _at(field, str(plan)):
        return choose_plan(request, plan)


def _made_until(checkpoint: Checkpoint) -> PlansByStep | None:
    """If the checkpoint's run switched plans on its own, return the plans that it had used up to the checkpoint."""
    by_step = read_plans_by_step(checkpoint.folder.parent.parent / PLANS_FILE)
    return by_step and by_step.until(checkpoint.step + 1)


@contextmanager
def _at(field: str, seen: str) -> Iterator[None]:
    """Name the step of a plan in the errors of the body. The table of a plan that does not fit stays."""
    try:
        yield
    except PlanDoesNotFit:
        raise
    except InvalidInput as error:
        raise InvalidInput(field, seen, f"a plan for this run ({error})") from error
