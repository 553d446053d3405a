"""`plan: measure(k)`: run the k plans with the best estimates for two steps each, and keep the fastest.

This is APP's Judger (arXiv:2312.11819, section V-C). A candidate that fails is reported and skipped.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from prefect import Flow
from prefect.artifacts import create_table_artifact
from prefect.client.schemas.objects import State

from prefect_rlhf.errors.errors import InvalidInput
from prefect_rlhf.errors.table import table
from prefect_rlhf.flows.training.log import log_info
from prefect_rlhf.flows.training.request import RunRequest
from prefect_rlhf.flows.training.spec.plan_choice import Measure
from prefect_rlhf.placement.augmented.augment import augment
from prefect_rlhf.placement.plan import ExecutionPlan, ModelInstance
from prefect_rlhf.placement.plans.plan_file import plan_yaml
from prefect_rlhf.placement.schedule.estimate import predict, without_evaluation
from prefect_rlhf.tasks.reporting.comparison import format_seconds, ranking, step_ends
from prefect_rlhf.tasks.reporting.publish import publish
from prefect_rlhf.tasks.running.journal import Journal
from prefect_rlhf.tasks.running.outcome import NodeOutcome
from prefect_rlhf.tasks.running.steps.learning import Findings
from prefect_rlhf.tasks.running.training_run import TrainingRun

STEPS_MEASURED = 2  # the first step builds and compiles, the second reuses that


@dataclass(frozen=True, slots=True)
class PlanTrial:
    """A plan that ran, or failed to run. Its time is that of the second step."""

    plan: ExecutionPlan
    predicted_seconds: float
    measured_seconds: float | None = None
    failure: str = ""


class _Silence:
    """An audience without output: a trial uses only the times of whole steps."""

    def built(self, instance: ModelInstance, outcome: NodeOutcome) -> None: ...

    def step_ended(self, metrics: Mapping[str, float], findings: Findings) -> None: ...

    def switches(self, run: TrainingRun) -> None: ...

    def switched(self, run: TrainingRun, seconds: float) -> None: ...


def measure(request: RunRequest, plans: Sequence[ExecutionPlan]) -> list[PlanTrial]:
    """Run the plans one after another; log, publish and return the trials. Raises InvalidInput if all of them fail."""
    trials = []
    for plan in plans:
        log_info(f"measuring plan {plan.name}: {STEPS_MEASURED} steps")
        trials.append(try_plan(request, plan))
    rows = trial_rows(trials)
    log_info(table(rows))
    publish(create_table_artifact, rows, key="measured-plans", description="Measured plans")
    fastest(trials)
    return trials


def try_plan(request: RunRequest, plan: ExecutionPlan) -> PlanTrial:
    """Run the first steps under a plan, as a subflow run with its own gang; its output is discarded."""
    from prefect_rlhf.tasks.running.train import train  # imported here: a dry run needs no engine

    graph, alone = without_evaluation(request.graph, plan)
    augmented = augment(graph, alone, STEPS_MEASURED)
    before, last = predict(augmented, request.workload, request.cost_sources).schedule.step_ends()[-2:]
    with TemporaryDirectory(prefix="rlhf-measure-") as folder:
        run = request.trial_run(graph, alone, STEPS_MEASURED, Path(folder))
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
        return PlanTrial(plan, last - before, ended - began)
    error = state.result(raise_on_failure=False)
    words = f"{type(error).__name__}: {error}" if isinstance(error, BaseException) else str(state.message)
    return PlanTrial(plan, last - before, failure=words.splitlines()[0])


def fastest(trials: Sequence[PlanTrial]) -> ExecutionPlan:
    """Return the plan with the fastest second step. Raises InvalidInput if all of them failed."""
    timed = [trial for trial in trials if trial.measured_seconds is not None]
    if not timed:
        failures = "; ".join(f"{trial.plan.name}: {trial.failure}" for trial in trials)
        raise InvalidInput("plan", str(Measure(len(trials))), f"at least one plan that runs ({failures})")
    return min(timed, key=lambda trial: trial.measured_seconds or 0.0).plan


def trial_rows(trials: Sequence[PlanTrial]) -> list[dict[str, str]]:
    """Return a table of predicted and measured step times with each plan's rank by both, fastest first."""
    ran = {trial.plan.name: trial for trial in trials if trial.measured_seconds is not None}
    predicted = ranking({name: trial.predicted_seconds for name, trial in ran.items()}, longest_first=False)
    measured = ranking({name: trial.measured_seconds or 0.0 for name, trial in ran.items()}, longest_first=False)
    return [
        {
            "plan": trial.plan.name,
            "predicted s": format_seconds(trial.predicted_seconds),
            "measured s": format_seconds(trial.measured_seconds),
            "ratio": format_seconds(
                trial.predicted_seconds / trial.measured_seconds if trial.measured_seconds else None
            ),
            "predicted order": str(predicted.get(trial.plan.name, "")),
            "measured order": str(measured.get(trial.plan.name, "")),
            "failure": trial.failure,
        }
        for trial in trials
    ]


def trials_json(trials: Sequence[PlanTrial]) -> str:
    """Return the trials as JSON; plans are written as plan files."""
    chosen = fastest(trials)
    plans = [
        {
            "name": trial.plan.name,
            "chosen": trial.plan is chosen,
            "predicted_seconds": trial.predicted_seconds,
            "measured_seconds": trial.measured_seconds,
            "failure": trial.failure,
            "plan": plan_yaml(trial.plan),
        }
        for trial in trials
    ]
    return json.dumps({"steps": STEPS_MEASURED, "plans": plans}, indent=1)
