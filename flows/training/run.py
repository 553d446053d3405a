"""One flow run, read from top to bottom: lease, inputs, graph, plan, augmented graph, training."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from prefect.runtime import flow_run

from prefect_rlhf.blocks.lease import leased_devices
from prefect_rlhf.flows.forms.options import RunOptions
from prefect_rlhf.flows.hardware.profiles import describe_sources, measured_sources
from prefect_rlhf.flows.training.auto_plan import ChosenPlan
from prefect_rlhf.flows.training.choose_plan import best_plans, choose_plan
from prefect_rlhf.flows.training.inputs import RunInputs, read_run_inputs
from prefect_rlhf.flows.training.log import log_info
from prefect_rlhf.flows.training.measured_plan import (
    Tried,
    fastest,
    first_steps,
    measure,
    plans_to_measure,
    tried_json,
    try_plan,
)
from prefect_rlhf.flows.training.workload import run_workload
from prefect_rlhf.placement.atomic_file import write_atomically
from prefect_rlhf.placement.augmented.augment import augment
from prefect_rlhf.placement.augmented.augmented_graph import AugmentedGraph
from prefect_rlhf.placement.cost.sources import CostSources
from prefect_rlhf.placement.cost.workload import Workload
from prefect_rlhf.placement.errors import InvalidInput
from prefect_rlhf.placement.graph import DataflowGraph
from prefect_rlhf.placement.lease import Lease
from prefect_rlhf.placement.memory.certificate import Certificate
from prefect_rlhf.placement.memory.fit import check_fits
from prefect_rlhf.placement.plan import ExecutionPlan
from prefect_rlhf.placement.planner.question import Question, Site
from prefect_rlhf.placement.plans.plan_file import plan_yaml
from prefect_rlhf.placement.schedule.estimate import Prediction, predict
from prefect_rlhf.tasks.checkpoints.folders import Checkpoint, check_resumable, clear_unfinished, find_checkpoint
from prefect_rlhf.tasks.checkpoints.run_identity import run_identity
from prefect_rlhf.tasks.reporting.report import RunReport, planned_timeline
from prefect_rlhf.tasks.running.journal import Journal
from prefect_rlhf.tasks.running.train import train
from prefect_rlhf.tasks.running.training_run import TrainingRun
from prefect_rlhf.tasks.trace import Algorithm


@dataclass(frozen=True, slots=True)
class RunRequest:
    """What a run was asked for, checked; `checkpoint` is where it goes on, None for a run from the start.

    `sources` are what is known of the lease's times: read when they are first asked for, since not every run needs any.
    """

    inputs: RunInputs
    graph: DataflowGraph
    workload: Workload
    checkpoint: Checkpoint | None
    sources: Callable[[], CostSources]


@dataclass(frozen=True, slots=True)
class PreparedRun:
    """A run that was checked and planned. `prediction` is None where nothing is known of the hardware.

    `tried` are the plans of `measure(k)`, each of which ran for two steps; empty for any other plan.
    """

    request: RunRequest
    augmented: AugmentedGraph
    certificate: Certificate
    prediction: Prediction | None
    tried: Sequence[Tried]


def run_algorithm(algorithm: Algorithm, arguments: Mapping[str, Any], options: RunOptions) -> Mapping[str, Any]:
    """Prepare a run of `algorithm`, then train; returns its run folder and trained models, of a dry run its plan."""
    with leased_devices(options.dry_run) as leased:
        prepared = prepare(algorithm, arguments, options, leased)
        report = RunReport(prepared.augmented, leased, prepared.prediction)
        report.planned()
        if options.dry_run:
            return {"plan": prepared.augmented.plan.name, "task_runs": len(prepared.augmented), "dry_run": True}
        return train_prepared(prepared, leased, options, report)


def prepare(algorithm: Algorithm, arguments: Mapping[str, Any], options: RunOptions, leased: Lease) -> PreparedRun:
    """Decide everything that comes before the first step. Raises InvalidInput or GraphError for what cannot run.

    Inputs are read, the graph is traced, a plan is chosen and proven to fit, every task run is made and its time
    predicted. No device is used, except for the plans of `measure(k)` unless it is a dry run.
    """
    inputs = read_run_inputs(arguments)
    graph = algorithm.trace(arguments, inputs.models, inputs.datasets)
    sources = cache(partial(measured_sources, graph.models, leased))
    request = RunRequest(inputs, graph, run_workload(graph, inputs), checkpoint_to_resume(graph, options), sources)
    tried = [] if options.dry_run else measured_plans(request, leased, options)
    if tried:
        plan = fastest(tried)
        chosen = ChosenPlan(plan, check_fits(plan, graph, request.workload, leased.kind))
    else:
        chosen = choose_plan(options.plan, graph, leased, request.workload, sources)
    first_step = request.checkpoint.step if request.checkpoint else 0
    augmented = augment(graph, chosen.plan, options.steps, first_step, options.checkpoint_every)
    predicted = prediction(augmented, request.workload, sources)
    return PreparedRun(request, augmented, chosen.certificate, predicted, tried)


def checkpoint_to_resume(graph: DataflowGraph, options: RunOptions) -> Checkpoint | None:
    """Return the checkpoint that the options name. Raises InvalidInput unless this run goes on where it is."""
    if options.resume_from is None:
        return None
    checkpoint = find_checkpoint(options.resume_from, Path(options.output_dir).expanduser())
    identity = run_identity(graph, options.seed, options.checkpoint_every)
    check_resumable(checkpoint, graph, identity, options.steps)
    return checkpoint


def measured_plans(request: RunRequest, leased: Lease, options: RunOptions) -> list[Tried]:
    """Run the plans of `measure(k)` for two steps each; none for any other plan."""
    count = plans_to_measure(options.plan)
    if count is None:
        return []
    question = Question(request.graph, Site.of_lease(leased, request.sources()), request.workload)
    plans = best_plans(question, count)
    if len(plans) < count:
        log_info(f"{options.plan}: there are no more than {len(plans)} different plans to measure")
    return measure(plans, lambda plan: run_two_steps(request, plan, leased, options), log_info)


def run_two_steps(request: RunRequest, plan: ExecutionPlan, leased: Lease, options: RunOptions) -> Tried:
    """Run the first steps under a plan, on the run's devices, with its seed; what they write is thrown away."""
    augmented = first_steps(request.graph, plan)
    predicted = predict(augmented, request.workload, request.sources())
    with TemporaryDirectory(prefix="rlhf-measure-") as folder:
        from_start = replace(request, checkpoint=None)
        return try_plan(plan, training_run(from_start, augmented, leased, options, Path(folder)), predicted)


def prediction(augmented: AugmentedGraph, workload: Workload, sources: Callable[[], CostSources]) -> Prediction | None:
    """Predict what each node will take; hardware that nobody knows stops no run whose plan is given."""
    try:
        predicted = predict(augmented, workload, sources())
    except InvalidInput as error:
        log_info(f"no predictions: {error}")
        return None
    log_info(describe_sources(sources()))
    return predicted


def train_prepared(prepared: PreparedRun, leased: Lease, options: RunOptions, report: RunReport) -> Mapping[str, Any]:
    """Train in a new folder of the run's; returns the folder and the trained models."""
    run_dir = new_folder(Path(options.output_dir).expanduser().resolve(), flow_run.name or "run")
    run = training_run(prepared.request, prepared.augmented, leased, options, run_dir)
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


def training_run(
    request: RunRequest, augmented: AugmentedGraph, leased: Lease, options: RunOptions, run_dir: Path
) -> TrainingRun:
    """Return what is fixed for the whole run."""
    return TrainingRun(
        augmented=augmented,
        lease=leased,
        sources=request.inputs.sources,
        tokenizer=request.inputs.tokenizer,
        run_dir=run_dir,
        seed=options.seed,
        max_sequence_length=request.workload.longest,
        call_deadline_seconds=options.call_deadline_seconds,
        checkpoint=request.checkpoint,
        checkpoint_every=options.checkpoint_every,
        keep_checkpoints=options.keep_checkpoints,
    )


def open_journal(run_dir: Path, prepared: PreparedRun) -> Journal:
    """Begin the run's record with what was decided: plan, certificate, planned timeline, plans measured."""
    predicted = prepared.prediction
    journal = Journal(run_dir, predicted.worked_seconds.get) if predicted else Journal(run_dir)
    journal.keep("plan.yaml", plan_yaml(prepared.augmented.plan))
    journal.keep("certificate.json", prepared.certificate.to_json())
    if predicted:
        journal.keep("plan.svg", planned_timeline(predicted))
    if prepared.tried:
        journal.keep("measured_plans.json", tried_json(prepared.tried))
    return journal


def trained_models(run: TrainingRun) -> dict[str, str]:
    """Return the folder of each model that the graph's export nodes wrote."""
    roles = [node.instance.role for node in run.augmented if node.kind == "export" and node.instance]
    return {role: str(run.run_dir / role) for role in roles}
