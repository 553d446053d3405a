"""One flow run, read from top to bottom: lease, request, plan, augmented graph, training."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from prefect.runtime import flow_run

from prefect_rlhf.blocks.lease import leased_devices
from prefect_rlhf.flows.forms.options import RunOptions
from prefect_rlhf.flows.hardware.profiles import describe_sources
from prefect_rlhf.flows.training.choose_plan import ChosenPlan, choose_plan
from prefect_rlhf.flows.training.log import log_info
from prefect_rlhf.flows.training.measured_plan import trials_json
from prefect_rlhf.flows.training.request import RunRequest, read_request
from prefect_rlhf.placement.atomic_file import write_atomically
from prefect_rlhf.placement.augmented.augment import augment
from prefect_rlhf.placement.augmented.augmented_graph import AugmentedGraph
from prefect_rlhf.placement.errors import InvalidInput
from prefect_rlhf.placement.lease import Lease
from prefect_rlhf.placement.plans.plan_file import plan_yaml
from prefect_rlhf.placement.schedule.estimate import Prediction, predict
from prefect_rlhf.tasks.checkpoints.folders import clear_unfinished
from prefect_rlhf.tasks.reporting.report import RunReport, planned_timeline
from prefect_rlhf.tasks.running.journal import Journal
from prefect_rlhf.tasks.running.train import train
from prefect_rlhf.tasks.running.training_run import TrainingRun
from prefect_rlhf.tasks.trace import Algorithm


@dataclass(frozen=True, slots=True)
class PreparedRun:
    """A run that was checked and planned. `prediction` is None where nothing is known of the hardware."""

    request: RunRequest
    chosen: ChosenPlan
    augmented: AugmentedGraph
    prediction: Prediction | None


def run_algorithm(algorithm: Algorithm, arguments: Mapping[str, Any], options: RunOptions) -> Mapping[str, Any]:
    """Prepare a run of `algorithm`, then train; returns its run folder and trained models, of a dry run its plan."""
    with leased_devices(options.dry_run) as lease:
        prepared = prepare(algorithm, arguments, options, lease)
        report = RunReport(prepared.augmented, lease, prepared.prediction)
        report.planned()
        if options.dry_run:
            return {"plan": prepared.augmented.plan.name, "task_runs": len(prepared.augmented), "dry_run": True}
        return train_prepared(prepared, report)


def prepare(algorithm: Algorithm, arguments: Mapping[str, Any], options: RunOptions, lease: Lease) -> PreparedRun:
    """Decide everything that comes before the first step. Raises InvalidInput or GraphError for what cannot run.

    Inputs are read, the graph is traced, a plan is chosen and proven to fit, every task run is made and its time
    predicted. No device is used, except by the plans of `measure(k)` unless it is a dry run.
    """
    request = read_request(algorithm, arguments, options, lease)
    chosen = choose_plan(request)
    first_step = request.checkpoint.step if request.checkpoint else 0
    augmented = augment(request.graph, chosen.plan, options.steps, first_step, options.checkpoint_every)
    return PreparedRun(request, chosen, augmented, predict_run(request, augmented))


def predict_run(request: RunRequest, augmented: AugmentedGraph) -> Prediction | None:
    """Predict what each node will take; hardware that nobody knows stops no run whose plan is given."""
    try:
        prediction = predict(augmented, request.workload, request.cost_sources)
    except InvalidInput as error:
        log_info(f"no predictions: {error}")
        return None
    log_info(describe_sources(request.cost_sources))
    return prediction


def train_prepared(prepared: PreparedRun, report: RunReport) -> Mapping[str, Any]:
    """Train in a new folder of the run's; returns the folder and the trained models."""
    request, options = prepared.request, prepared.request.options
    run_dir = new_folder(Path(options.output_dir).expanduser().resolve(), flow_run.name or "run")
    run = request.training_run(prepared.augmented, run_dir, request.checkpoint)
    journal = open_journal(run_dir, prepared)
    report.started(journal)
    report.resumed(run)
    try:
        train(run, journal, report, options.steps_per_group)
    except BaseException:  # a cancellation too
        clear_unfinished(run_dir)
        report.stopped(run)
        raise
    report.finished()
    write_atomically(run_dir.parent / "latest", lambda part: part.symlink_to(run_dir.name))
    return {"run_dir": str(run_dir), "models": trained_models(run)}


def new_folder(output_dir: Path, name: str) -> Path:
    """Make `output_dir/name`, with a number after it where a run of that name was, as of a flow run that is retried."""
    folder, again = output_dir / name, 2
    while folder.exists():
        folder, again = output_dir / f"{name}-{again}", again + 1
    folder.mkdir(parents=True)
    return folder


def open_journal(run_dir: Path, prepared: PreparedRun) -> Journal:
    """Begin the run's record with what was decided: plan, certificate, planned timeline, plans measured."""
    chosen, prediction = prepared.chosen, prepared.prediction
    journal = Journal(run_dir, prediction.worked_seconds.get) if prediction else Journal(run_dir)
    journal.keep("plan.yaml", plan_yaml(chosen.plan))
    journal.keep("certificate.json", chosen.certificate.to_json())
    if prediction:
        journal.keep("plan.svg", planned_timeline(prediction))
    if chosen.trials:
        journal.keep("measured_plans.json", trials_json(chosen.trials))
    return journal


def trained_models(run: TrainingRun) -> dict[str, str]:
    """Return the folder of each model that the graph's export nodes wrote."""
    roles = [node.instance.role for node in run.augmented if node.kind == "export" and node.instance]
    return {role: str(run.run_dir / role) for role in roles}
