"""The request for a run, read and checked: its inputs, its graph, and the checkpoint where it goes on."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from prefect_rlhf.flows.forms.options import RunOptions
from prefect_rlhf.flows.hardware.profiles import measured_sources
from prefect_rlhf.flows.training.inputs import RunInputs, read_run_inputs
from prefect_rlhf.flows.training.workload import run_workload
from prefect_rlhf.placement.augmented.augmented_graph import AugmentedGraph
from prefect_rlhf.placement.cost.sources import CostSources
from prefect_rlhf.placement.cost.workload import Workload
from prefect_rlhf.placement.graph import DataflowGraph
from prefect_rlhf.placement.lease import Lease
from prefect_rlhf.placement.planner.question import Question, Site
from prefect_rlhf.tasks.checkpoints.folders import Checkpoint, check_resumable, find_checkpoint
from prefect_rlhf.tasks.checkpoints.run_identity import run_identity
from prefect_rlhf.tasks.running.training_run import TrainingRun
from prefect_rlhf.tasks.trace import Algorithm


@dataclass(frozen=True)
class RunRequest:
    """A checked request for a run; `checkpoint` is where it goes on, None for a run from the start."""

    options: RunOptions
    lease: Lease
    inputs: RunInputs
    graph: DataflowGraph
    workload: Workload
    checkpoint: Checkpoint | None

    @cached_property
    def cost_sources(self) -> CostSources:
        """Times of the lease's devices, read once, and not before they are needed: nobody may know the hardware."""
        return measured_sources(self.graph.models, self.lease)

    @property
    def question(self) -> Question:
        """The question which plan is best for this run. Raises InvalidInput where nobody knows the hardware."""
        return Question(self.graph, Site.of_lease(self.lease, self.cost_sources), self.workload)

    def training_run(self, augmented: AugmentedGraph, run_dir: Path, checkpoint: Checkpoint | None) -> TrainingRun:
        """Return the values that are fixed while `augmented` runs."""
        return TrainingRun(
            augmented=augmented,
            lease=self.lease,
            sources=self.inputs.sources,
            tokenizer=self.inputs.tokenizer,
            run_dir=run_dir,
            seed=self.options.seed,
            max_sequence_length=self.workload.longest,
            call_deadline_seconds=self.options.call_deadline_seconds,
            checkpoint=checkpoint,
            checkpoint_every=self.options.checkpoint_every,
            keep_checkpoints=self.options.keep_checkpoints,
        )


def read_request(algorithm: Algorithm, arguments: Mapping[str, Any], options: RunOptions, lease: Lease) -> RunRequest:
    """Read inputs and graph. Raises InvalidInput or GraphError for what cannot run."""
    inputs = read_run_inputs(arguments)
    graph = algorithm.trace(arguments, inputs.models, inputs.datasets)
    workload, checkpoint = run_workload(graph, inputs), None
    if options.resume_from is not None:
        checkpoint = find_checkpoint(options.resume_from, Path(options.output_dir).expanduser())
        identity = run_identity(graph, options.seed, options.checkpoint_every)
        check_resumable(checkpoint, graph, identity, options.steps)
    return RunRequest(options, lease, inputs, graph, workload, checkpoint)
