"""`plan: measure(k)`: the k plans that the estimate likes best run two steps each, and the fastest is kept.

APP's Judger (arXiv:2312.11819, section V-C). A candidate that fails is reported and left out.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from prefect import Flow
from prefect.artifacts import create_table_artifact
from prefect.client.schemas.objects import State

from prefect_rlhf.flows.training.log import LogLine
from prefect_rlhf.placement.augmented.augment import augment
from prefect_rlhf.placement.augmented.augmented_graph import AugmentedGraph
from prefect_rlhf.placement.errors import InvalidInput
from prefect_rlhf.placement.graph import DataflowGraph
from prefect_rlhf.placement.plan import ExecutionPlan, ModelInstance
from prefect_rlhf.placement.plans.plan_file import plan_yaml
from prefect_rlhf.placement.schedule.estimate import Prediction, training
from prefect_rlhf.placement.table import table
from prefect_rlhf.tasks.reporting.comparison import format_seconds, ranking, step_ends
from prefect_rlhf.tasks.reporting.publish import publish
from prefect_rlhf.tasks.running.journal import Journal
from prefect_rlhf.tasks.running.outcome import NodeOutcome
from prefect_rlhf.tasks.running.train import train
from prefect_rlhf.tasks.running.training_run import TrainingRun

WORD = "measure"
MOST_PLANS = 10
STEPS_MEASURED = 2  # the first one builds and compiles what the second reuses


@dataclass(frozen=True, slots=True)
class Tried:
    """A plan that ran, or failed to. Seconds are of its second step."""

    plan: ExecutionPlan
    predicted_seconds: float
    measured_seconds: float | None = None
    failure: str = ""


def plans_to_measure(name: str) -> int | None:
    """The k of `measure(k)`; None for another plan's name. Raises InvalidInput for a k that cannot be.

    >>> plans_to_measure("measure(3)"), plans_to_measure("flattening")
    (3, None)
    """
    if not re.fullmatch(rf"{WORD}\b.*", name) or name.endswith((".yaml", ".yml", ".json")):
        return None
    found = re.fullmatch(rf"{WORD}\((\d{{1,3}})\)", name)
    if found is None or not 1 <= int(found[1]) <= MOST_PLANS:
        raise InvalidInput("plan", name, f"{WORD}(k), where k plans are run, from 1 to {MOST_PLANS}")
    return int(found[1])


def first_steps(graph: DataflowGraph, plan: ExecutionPlan) -> AugmentedGraph:
    """The steps that are measured, without evaluation and without what comes after the last step."""
    trained = training(graph)
    names = {call.name for call in trained}
    placements = tuple((name, placement) for name, placement in plan.placements if name in names)
    augmented = augment(trained, replace(plan, placements=placements), STEPS_MEASURED)
    return replace(augmented, nodes=tuple(node for node in augmented if node.step < STEPS_MEASURED))


class _Silence:
    """An audience that says nothing: the steps only count as a whole."""

    def built(self, instance: ModelInstance, outcome: NodeOutcome) -> None: ...

    def step_ended(self, metrics: Mapping[str, float]) -> None: ...


def try_plan(plan: ExecutionPlan, run: TrainingRun, predicted: Prediction) -> Tried:
    """Run it as a subflow run with a gang of its own, which is gone afterwards."""
    before, last = predicted.schedule.step_ends()[-2:]
    journal = Journal(run.run_dir)
    flow = Flow(
        lambda: train(run, journal, _Silence(), STEPS_MEASURED),
        name="rlhf-measure",
        flow_run_name=f"measure {plan.name}",
        validate_parameters=False,
    )
    state: State[Any] = flow(return_state=True)
    if state.is_completed():
        began, ended = step_ends(journal.last_steps(STEPS_MEASURED))[-2:]
        return Tried(plan, last - before, ended - began)
    error = state.result(raise_on_failure=False)
    words = f"{type(error).__name__}: {error}" if isinstance(error, BaseException) else str(state.message)
    return Tried(plan, last - before, failure=words.splitlines()[0])


def measure(plans: Sequence[ExecutionPlan], run: Callable[[ExecutionPlan], Tried], say: LogLine) -> list[Tried]:
    """Run each plan in turn; tell, show and return how it went. Raises InvalidInput when every one fails."""
    tried = []
    for plan in plans:
        say(f"measuring plan {plan.name}: {STEPS_MEASURED} steps")
        tried.append(run(plan))
    rows = tried_rows(tried)
    say(table(rows))
    publish(create_table_artifact, rows, key="measured-plans", description="Plans that were measured")
    fastest(tried)
    return tried


def fastest(tried: Sequence[Tried]) -> ExecutionPlan:
    """The plan whose second step took the least."""
    timed = [(one.measured_seconds, index) for index, one in enumerate(tried) if one.measured_seconds is not None]
    if not timed:
        failures = "; ".join(f"{one.plan.name}: {one.failure}" for one in tried)
        raise InvalidInput("plan", f"{WORD}({len(tried)})", f"at least one plan that runs ({failures})")
    return tried[min(timed)[1]].plan


def tried_rows(tried: Sequence[Tried]) -> list[dict[str, str]]:
    """For a table: predicted beside measured seconds, and the order by each, the fastest first."""
    ran = {one.plan.name: one for one in tried if one.measured_seconds is not None}
    predicted = ranking({name: one.predicted_seconds for name, one in ran.items()}, longest_first=False)
    measured = ranking({name: one.measured_seconds or 0.0 for name, one in ran.items()}, longest_first=False)
    return [
        {
            "plan": one.plan.name,
            "predicted s": format_seconds(one.predicted_seconds),
            "measured s": format_seconds(one.measured_seconds),
            "ratio": format_seconds(one.predicted_seconds / one.measured_seconds if one.measured_seconds else None),
            "predicted order": str(predicted.get(one.plan.name, "")),
            "measured order": str(measured.get(one.plan.name, "")),
            "failure": one.failure,
        }
        for one in tried
    ]


def tried_json(tried: Sequence[Tried]) -> str:
    """The same for a machine, with the plans themselves as plan files."""
    chosen = fastest(tried)
    plans = [
        {
            "name": one.plan.name,
            "chosen": one.plan is chosen,
            "predicted_seconds": one.predicted_seconds,
            "measured_seconds": one.measured_seconds,
            "failure": one.failure,
            "plan": plan_yaml(one.plan),
        }
        for one in tried
    ]
    return json.dumps({"steps": STEPS_MEASURED, "plans": plans}, indent=1)
