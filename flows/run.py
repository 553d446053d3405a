"""One flow run, read from top to bottom: inputs, graph, lease, plan, augmented graph, training."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from prefect.runtime import flow_run

from prefect_rlhf.blocks.lease import lease
from prefect_rlhf.flows.auto_plan import AUTO, auto_plan, say_in_log
from prefect_rlhf.flows.inputs import Inputs, longest_sequence, read_inputs
from prefect_rlhf.flows.options import RunOptions
from prefect_rlhf.placement.alignment import aligned
from prefect_rlhf.placement.augment import augment
from prefect_rlhf.placement.augmented import AugmentedGraph
from prefect_rlhf.placement.check import check_plan
from prefect_rlhf.placement.errors import RlhfError
from prefect_rlhf.placement.fit import check_memory
from prefect_rlhf.placement.graph import DataflowGraph
from prefect_rlhf.placement.lease import Lease
from prefect_rlhf.placement.mesh import ClusterShape
from prefect_rlhf.placement.plan import ExecutionPlan
from prefect_rlhf.placement.plan_file import read_plan
from prefect_rlhf.placement.presets import PRESETS, preset
from prefect_rlhf.tasks.algorithm import Algorithm
from prefect_rlhf.tasks.checkpoints import Checkpoint, check_resumable, find_checkpoint
from prefect_rlhf.tasks.failures import failed
from prefect_rlhf.tasks.journal import Journal
from prefect_rlhf.tasks.report import Report
from prefect_rlhf.tasks.session import train
from prefect_rlhf.tasks.training_run import TrainingRun

ONE_DEVICE = ClusterShape("local", num_nodes=1, devices_per_node=1, device_memory_bytes=64 << 30)
"""What a run without a worker gets: one device and no gang, as a debugger wants it."""


def run_algorithm(algorithm: Algorithm, arguments: Mapping[str, Any], options: RunOptions) -> Any:
    """Run `algorithm`; returns its run folder and trained models, or a Failed state that says why in one line."""
    try:
        return _run(algorithm, arguments, options)
    except RlhfError as error:  # a mistake that a person can mend: its one line, without a traceback
        return failed(error)


@dataclass(frozen=True, slots=True)
class Prepared:
    """A run that was checked and planned; `longest` is the number of tokens of its longest row.

    `checkpoint` is where it goes on, None for a run from the start.
    """

    inputs: Inputs
    augmented: AugmentedGraph
    longest: int
    checkpoint: Checkpoint | None = None


def prepare(algorithm: Algorithm, arguments: Mapping[str, Any], options: RunOptions, held: Lease) -> Prepared:
    """Everything that is decided before a device is used. Raises InvalidInput or GraphError for what cannot run."""
    inputs = read_inputs(arguments)
    graph = algorithm.trace(arguments, inputs.models, inputs.datasets)
    longest = longest_sequence(graph, inputs)
    checkpoint = checkpoint_to_resume(graph, options)
    plan = choose_plan(options.plan, graph, held, longest)
    first_step = checkpoint.step if checkpoint else 0
    augmented = augment(graph, plan, options.steps, first_step, options.checkpoint_every)
    return Prepared(inputs, augmented, longest, checkpoint)


def checkpoint_to_resume(graph: DataflowGraph, options: RunOptions) -> Checkpoint | None:
    """The checkpoint that the options name. Raises InvalidInput unless this run goes on where it is."""
    if options.resume_from is None:
        return None
    checkpoint = find_checkpoint(options.resume_from, Path(options.output_dir).expanduser())
    check_resumable(checkpoint, graph, options.seed, options.steps)
    return checkpoint


def _run(algorithm: Algorithm, arguments: Mapping[str, Any], options: RunOptions) -> Mapping[str, Any]:
    with run_lease(options) as held:
        prepared = prepare(algorithm, arguments, options, held)
        report = Report(prepared.augmented, held)
        report.planned()
        if options.dry_run:
            return {"plan": prepared.augmented.plan.name, "task_runs": len(prepared.augmented), "dry_run": True}
        run = training_run(prepared, held, options)
        journal = Journal(run.run_dir)
        report.started(journal)
        report.resumed(run)
        train(run, journal, report, options.steps_per_group)
        report.finished()
        _point_latest_to(run.run_dir)
        return {"run_dir": str(run.run_dir), "models": trained_models(run)}


def choose_plan(name: str, graph: DataflowGraph, held: Lease, longest: int) -> ExecutionPlan:
    """The searched plan (`auto`), the preset of that name, or the plan in that file; checked against graph, models,
    lease and device memory.

    Where it states no order of devices, copies of trained weights get the one that moves the least. `longest` is the
    number of tokens of the longest row.
    """
    cluster = held.cluster
    if name == AUTO:
        plan = auto_plan(graph, held, longest, say_in_log)
    elif name in PRESETS:
        plan = preset(name, graph, cluster, held.mesh, longest, held.kind)
    else:
        plan = read_plan(Path(name), cluster)
    plan = aligned(check_plan(plan, graph, held.mesh), graph)
    return check_memory(plan, graph, longest, held.kind)


@contextmanager
def run_lease(options: RunOptions) -> Iterator[Lease]:
    """The devices that the worker leased for this run; without a worker, one device of this machine."""
    given = Lease.from_environment()
    if given is not None:
        yield given
    elif options.dry_run:
        yield Lease("local", "dry-run", ONE_DEVICE, ONE_DEVICE.whole, ())
    else:
        with lease(ONE_DEVICE, 1) as held:
            yield held


def training_run(prepared: Prepared, held: Lease, options: RunOptions) -> TrainingRun:
    """What is fixed for the whole run; its folder is named after the flow run."""
    name = flow_run.name or "run"
    return TrainingRun(
        augmented=prepared.augmented,
        lease=held,
        sources=prepared.inputs.sources,
        tokenizer=prepared.inputs.tokenizer,
        run_dir=(Path(options.output_dir).expanduser() / name).resolve(),
        seed=options.seed,
        max_sequence_length=prepared.longest,
        call_deadline_seconds=options.call_deadline_seconds,
        checkpoint=prepared.checkpoint,
        keep_checkpoints=options.keep_checkpoints,
    )


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
