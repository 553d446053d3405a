"""A run's best model by an evaluation metric: its checkpoint, and when to stop early.

Both follow from the run's own record, so a resumed run decides the same way.
"""

import math
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from prefect_rlhf.errors.errors import InvalidInput
from prefect_rlhf.files.foreign_file import finished_lines
from prefect_rlhf.files.storage.inputs import model_folder
from prefect_rlhf.files.storage.mirror import on_this_machine
from prefect_rlhf.placement.graph import DataflowGraph
from prefect_rlhf.placement.models.model import ModelSpec
from prefect_rlhf.placement.models.weights import weights_of
from prefect_rlhf.tasks.checkpoints.elsewhere import MANIFEST, publish, recall_checkpoint
from prefect_rlhf.tasks.checkpoints.folders import folder_of
from prefect_rlhf.tasks.checkpoints.metric_names import hint, metric_names

EVALUATIONS = "evaluation.jsonl"  # in the run's folder: a line for each execution of the graph's evaluation calls


@dataclass(frozen=True, slots=True)
class Evaluation:
    """The metric's value for the weights after `step` steps."""

    step: int
    value: float


@dataclass(frozen=True, slots=True)
class BestModel:
    """Selects the best evaluation: the highest or lowest value of `metric`, and the earlier of equal values.

    With `patience`, a run ends after this many evaluations without improvement. Its initial weights are not a
    candidate.
    """

    metric: str
    highest: bool = True
    patience: int | None = None

    @property
    def call(self) -> str:
        """The name of the call that reports the metric."""
        return self.metric.rpartition(".")[0]

    def check(self, graph: DataflowGraph, checkpoint_every: int | None, keep_checkpoints: int) -> None:
        """Raise InvalidInput unless some call evaluates the metric and each of its evaluations has a checkpoint."""
        evaluations = {call.name: call.every for call in graph if call.every is not None}
        every = evaluations.get(self.call)
        if every is None:
            names = ", ".join(f"{name}.*" for name in evaluations) or "no metric, as this algorithm does not evaluate"
            raise InvalidInput("best_metric", self.metric, f"a metric of evaluation.jsonl: {names}")
        if checkpoint_every is None or every % checkpoint_every:
            expected = f"a divisor of {every}, the steps between evaluations: the best model comes from a checkpoint"
            raise InvalidInput("checkpoint_every", checkpoint_every, expected)
        if keep_checkpoints < 2:
            raise InvalidInput("keep_checkpoints", keep_checkpoints, "at least 2 with best_metric")

    def check_metric(self, graph: DataflowGraph, tried: Mapping[str, Sequence[str]]) -> str | None:
        """Raise InvalidInput if the call cannot have the metric; return a warning if it might not.

        `tried` are the metrics that calls reported on made-up rows.
        """
        names = {call.name: metric_names(call, tried.get(call.name)) for call in graph if call.every is not None}
        own, name = names[self.call], self.metric.rpartition(".")[2]
        if name in own.known:
            return None
        known = [f"{call}.{each}" for call, of_call in names.items() for each in of_call.known]
        likely = hint(self.metric, "evaluations have", known)
        if own.excludes(name):
            raise InvalidInput("best_metric", self.metric, likely)
        return f"best_metric: only the first evaluation shows whether {self.metric} exists; if not, {likely}"

    def evaluations(self, run_dir: Path) -> list[Evaluation]:
        """Read the evaluations so far, oldest first. A value is NaN if no row had a score.

        Raises InvalidInput if no evaluation has the metric, unless the last had only rows without a score.
        """
        found = list(finished_lines("resume_from", run_dir / EVALUATIONS))
        if found and not any(self.metric in one for one in found) and found[-1].get(f"{self.call}.unscored") != 1:
            known = ", ".join(name for name in found[-1] if name != "step")
            raise InvalidInput("best_metric", self.metric, f"an evaluated metric: {known}")
        own = [one for one in found if any(name.startswith(f"{self.call}.") for name in one)]
        return [Evaluation(one["step"], one.get(self.metric, math.nan)) for one in own if one["step"] > 0]

    def best(self, run_dir: Path) -> Evaluation | None:
        """Return the best evaluation so far; None if no evaluation has a number yet."""
        sign = 1 if self.highest else -1
        numbers = [one for one in self.evaluations(run_dir) if not math.isnan(one.value)]
        return max(numbers, key=lambda one: (sign * one.value, -one.step), default=None)

    def enough(self, run_dir: Path) -> str | None:
        """Return the reason for stopping early, or None to continue."""
        best = self.best(run_dir)
        if self.patience is None or best is None:
            return None
        later = sum(one.step > best.step for one in self.evaluations(run_dir))
        if later < self.patience:
            return None
        return f"no better {self.metric} than {best.value:.4g} after {best.step} steps in {later} evaluations"

    def spared(self, run_dir: Path) -> Path | None:
        """Return the folder of the best checkpoint so far, which must not be deleted; None without an evaluation."""
        best = self.best(run_dir)
        return None if best is None else folder_of(run_dir, best.step)


def carry_over_best(best: BestModel, earlier: Path, run_dir: Path) -> None:
    """Copy the best checkpoint of an earlier run into the folder of the run that resumes it."""
    source = best.spared(run_dir)  # its record was carried over
    if source is None or source.is_dir():
        return
    stored = earlier / source.relative_to(run_dir)
    recall_checkpoint(stored, "resume_from")
    if (stored / MANIFEST).is_file():
        shutil.copytree(stored, source)
        publish(source, last=MANIFEST)


def export_stored(checkpoint: Path, spec: ModelSpec, path: Path, merge: bool = False) -> None:
    """Export a role's model from a checkpoint, rounded to the dtype of its training: see `write_trained`.

    The folder gets the trained model's tokenizer.
    """
    import torch  # only here: a dry run without torch reads checkpoints

    from prefect_rlhf.engines.files.checkpoint_files import StoredState
    from prefect_rlhf.engines.files.export import write_trained
    from prefect_rlhf.engines.files.peft_export import trained_parameters

    folders = [on_this_machine(checkpoint / own.name) for own in weights_of(spec, trained=True) if own.trained]
    stored, dtype = StoredState(*folders), getattr(torch, spec.dtype)
    tensors = (
        (one.name, stored.read("main", one.name, tuple((0, size) for size in one.shape)).to(dtype))
        for one in trained_parameters(spec)
    )
    tokenizer = model_folder(spec.path, f"{spec.role}.path", "tokenizer")
    write_trained(path, spec, tensors, tokenizer, merge=merge)
