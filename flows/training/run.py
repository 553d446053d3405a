"""One flow run, read from top to bottom: inputs, graph, lease, plan, augmented graph, training."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from prefect.runtime import flow_run

from prefect_rlhf.blocks.lease import held_devices
from prefect_rlhf.flows.forms.options import RunOptions
from prefect_rlhf.flows.hardware.profiles import describe_sources, measured_sources
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
from prefect_rlhf.placement.augmented.augment import augment
from prefect_rlhf.placement.augmented.augmented_graph import AugmentedGraph
from prefect_rlhf.placement.cost.workload import Workload
from prefect_rlhf.placement.errors import InvalidInput, PlanDoesNotFit, RlhfError
from prefect_rlhf.placement.graph import DataflowGraph
from prefect_rlhf.placement.lease import Lease
from prefect_rlhf.placement.memory.certificate import Certificate
from prefect_rlhf.placement.memory.fit import check_fits
from prefect_rlhf.placement.plan import ExecutionPlan
from prefect_rlhf.placement.plans.plan_file import plan_yaml
from prefect_rlhf.placement.schedule.estimate import Prediction, predict
from prefect_rlhf.tasks.checkpoints.folders import Checkpoint, check_resumable, clear_unfinished, find_checkpoint
from prefect_rlhf.tasks.checkpoints.run_identity import run_identity
from prefect_rlhf.tasks.failures import failed
from prefect_rlhf.tasks.reporting.report import RunReport, planned_timeline, show_refusal
from prefect_rlhf.tasks.running.journal import Journal
from prefect_rlhf.tasks.running.train import train
from prefect_rlhf.tasks.running.training_run import TrainingRun
from prefect_rlhf.tasks.trace import Algorithm


def run_algorithm(algorithm: Algorithm, arguments: Mapping[str, Any], options: RunOptions) -> Any:
    """Run `algorithm`; returns its run folder and trained models, or a Failed state that says why in one line."""
    try:
        return _run(algorithm, arguments, options)
    except RlhfError as error:  # a mistake that a person can mend: its one line, without a traceback
        if isinstance(error, PlanDoesNotFit):
            show_refusal(error)
        return failed(error)


@dataclass(frozen=True, slots=True)
class RunRequest:
    """What a run was asked for, checked; `checkpoint` is where it goes on, None for a run from the start."""

    inputs: RunInputs
    graph: DataflowGraph
    workload: Workload
    checkpoint: Checkpoint | None


@dataclass(frozen=True, slots=True)
class Prepared:
    """A run that was checked and planned. `prediction` is None where nothing is known of the hardware."""

    asked: RunRequest
    augmented: AugmentedGraph
    certificate: Certificate
    prediction: Prediction | None


def prepare(algorithm: Algorithm, arguments: Mapping[str, Any], options: RunOptions, held: Lease) -> Prepared:
    """Everything that is decided before a device is used. Raises InvalidInput or GraphError for what cannot run.

    Of plans that are still to be measured it is the one that the estimate likes best.
    """
    asked = ask(algorithm, arguments, options)
    return planned(asked, choose_plan(options.plan, asked.graph, held, asked.workload), held, options)


def ask(algorithm: Algorithm, arguments: Mapping[str, Any], options: RunOptions) -> RunRequest:
    """Read inputs and graph."""
    inputs = read_run_inputs(arguments)
    graph = algorithm.trace(arguments, inputs.models, inputs.datasets)
    return RunRequest(inputs, graph, run_workload(graph, inputs), checkpoint_to_resume(graph, options))


def planned(asked: RunRequest, plan: ExecutionPlan, held: Lease, options: RunOptions) -> Prepared:
    """The run under a plan: proven to fit, every task run made, and its times predicted."""
    certificate = check_fits(plan, asked.graph, asked.workload, held.kind)
    first_step = asked.checkpoint.step if asked.checkpoint else 0
    augmented = augment(asked.graph, plan, options.steps, first_step, options.checkpoint_every)
    return Prepared(asked, augmented, certificate, prediction(augmented, asked.workload, held))


def prediction(augmented: AugmentedGraph, workload: Workload, held: Lease) -> Prediction | None:
    """What each node will take; hardware that nobody knows stops no run whose plan is given."""
    try:
        sources = measured_sources(augmented.graph.models, held)
        found = predict(augmented, workload, sources)
    except InvalidInput as error:
        log_info(f"no predictions: {error}")
        return None
    log_info(describe_sources(sources))
    return found


def checkpoint_to_resume(graph: DataflowGraph, options: RunOptions) -> Checkpoint | None:
    """The checkpoint that the options name. Raises InvalidInput unless this run goes on where it is."""
    if options.resume_from is None:
        return None
    checkpoint = find_checkpoint(options.resume_from, Path(options.output_dir).expanduser())
    problem = run_identity(graph, options.seed, options.checkpoint_every)
    check_resumable(checkpoint, graph, problem, options.steps)
    return checkpoint


def _run(algorithm: Algorithm, arguments: Mapping[str, Any], options: RunOptions) -> Mapping[str, Any]:
    with held_devices(options.dry_run) as held:
        asked = ask(algorithm, arguments, options)
        tried = measured_plans(asked, held, options)
        plan = fastest(tried) if tried else choose_plan(options.plan, asked.graph, held, asked.workload)
        prepared = planned(asked, plan, held, options)
        report = RunReport(prepared.augmented, held, prepared.prediction)
        report.planned()
        if options.dry_run:
            return {"plan": prepared.augmented.plan.name, "task_runs": len(prepared.augmented), "dry_run": True}
        run_dir = new_folder(Path(options.output_dir).expanduser().resolve(), flow_run.name or "run")
        run = training_run(asked, prepared.augmented, held, options, run_dir)
        journal = open_journal(run_dir, prepared, tried)
        report.started(journal)
        report.resumed(run)
        try:
            train(run, journal, report, options.steps_per_group)
        except BaseException:  # a cancellation too
            clear_unfinished(run.run_dir)
            report.stopped(run)
            raise
        report.finished()
        _point_latest_to(run.run_dir)
        return {"run_dir": str(run.run_dir), "models": trained_models(run)}


def measured_plans(asked: RunRequest, held: Lease, options: RunOptions) -> list[Tried]:
    """The plans of `measure(k)`, each of which ran for two steps; none for any other plan, and for a dry run."""
    count = plans_to_measure(options.plan)
    if count is None or options.dry_run:
        return []
    found = best_plans(asked.graph, held, asked.workload, count)
    if len(found) < count:
        log_info(f"{options.plan}: there are no more than {len(found)} different plans to measure")
    return measure(found, lambda plan: two_steps(asked, plan, held, options), log_info)


def two_steps(asked: RunRequest, plan: ExecutionPlan, held: Lease, options: RunOptions) -> Tried:
    """The run's first steps under a plan, on its devices, with its seed; what they write is thrown away."""
    augmented = first_steps(asked.graph, plan)
    predicted = predict(augmented, asked.workload, measured_sources(asked.graph.models, held))
    with TemporaryDirectory(prefix="rlhf-measure-") as folder:
        from_start = replace(asked, checkpoint=None)
        return try_plan(plan, training_run(from_start, augmented, held, options, Path(folder)), predicted)


def open_journal(run_dir: Path, prepared: Prepared, tried: Sequence[Tried]) -> Journal:
    """The run's record, which begins with what was decided: plan, certificate, planned timeline, plans measured."""
    known = prepared.prediction
    journal = Journal(run_dir, known.worked_seconds.get) if known else Journal(run_dir)
    journal.keep("plan.yaml", plan_yaml(prepared.augmented.plan))
    journal.keep("certificate.json", prepared.certificate.to_json())
    if known:
        journal.keep("plan.svg", planned_timeline(known))
    if tried:
        journal.keep("measured_plans.json", tried_json(tried))
    return journal


def training_run(
    asked: RunRequest, augmented: AugmentedGraph, held: Lease, options: RunOptions, run_dir: Path
) -> TrainingRun:
    """What is fixed for the whole run."""
    return TrainingRun(
        augmented=augmented,
        lease=held,
        sources=asked.inputs.sources,
        tokenizer=asked.inputs.tokenizer,
        run_dir=run_dir,
        seed=options.seed,
        max_sequence_length=asked.workload.longest,
        call_deadline_seconds=options.call_deadline_seconds,
        checkpoint=asked.checkpoint,
        checkpoint_every=options.checkpoint_every,
        keep_checkpoints=options.keep_checkpoints,
    )


def new_folder(output_dir: Path, name: str) -> Path:
    """Make `output_dir/name`, with a number after it where a run of that name was, as of a flow run that is retried."""
    folder, again = output_dir / name, 2
    while folder.exists():
        folder, again = output_dir / f"{name}-{again}", again + 1
    folder.mkdir(parents=True)
    return folder


def trained_models(run: TrainingRun) -> dict[str, str]:
    """The folder of each model that the graph's export nodes wrote."""
    roles = [node.instance.role for node in run.augmented if node.kind == "export" and node.instance]
    return {role: str(run.run_dir / role) for role in roles}


def _point_latest_to(run_dir: Path) -> None:
    """`<output_dir>/latest` is the run that ended last, for whatever comes next to find it."""
    link, beside = run_dir.parent / "latest", run_dir.parent / f".latest-{run_dir.name}"
    beside.unlink(missing_ok=True)
    beside.symlink_to(run_dir.name)
    beside.replace(link)
