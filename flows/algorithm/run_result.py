"""The result of a run for the Python code that started it; for a dry run, the plan."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from prefect_rlhf.errors.errors import InvalidInput
from prefect_rlhf.files.foreign_file import finished_lines
from prefect_rlhf.files.remote_path import local_path
from prefect_rlhf.flows.training.run import PreparedRun
from prefect_rlhf.flows.training.run_folder import read_result
from prefect_rlhf.placement.plans.plan_file import plan_yaml
from prefect_rlhf.tasks.data.rollouts import ROLLOUTS, step_files
from prefect_rlhf.tasks.reporting.pictures.text import graph_text, plan_text
from prefect_rlhf.tasks.reporting.run_record import RunRecord, read_parameters


@dataclass(frozen=True, slots=True)
class RunResult:
    """A finished run."""

    run_dir: str
    """The run folder."""
    models: Mapping[str, str]
    """For each trained role, a Hugging Face folder that you can pass as `path` to the next run's model.

    With `best_metric`, these are the best models instead of the last.
    """
    best: Mapping[str, Any] | None = None
    """With `best_metric`: the best `metric`, its `value` and its `step`."""
    ended_early: str | None = None
    """Why the run ended before its last step; None if it did not."""
    warnings: tuple[str, ...] = ()
    """A line for each sign that the run learnt badly, such as steps without a gradient, also before a resume."""

    @classmethod
    def of(cls, found: Mapping[str, Any]) -> RunResult:
        """Return a flow run's result. Its lists may have become plain lists in JSON."""
        return cls(**{**found, "warnings": tuple(found.get("warnings", ()))})

    @classmethod
    def read(cls, run_dir: str | Path) -> RunResult:
        """Read a finished run from its folder, such as `runs/latest`.

        Raises InvalidInput if the folder has no finished run.
        """
        result = read_result(local_path(str(run_dir), "run_dir").expanduser())
        if result is None:
            raise InvalidInput("run_dir", str(run_dir), "the folder of a run that reached its end (it has result.json)")
        return cls.of(result)

    @property
    def _folder(self) -> Path:
        return local_path(self.run_dir, "run_dir")

    @property
    def metrics(self) -> list[dict[str, float]]:
        """A dict for each step: `step` (from 1), every call's metrics as `call.metric`, and `seconds`."""
        return list(finished_lines("run_dir", self._folder / "metrics.jsonl"))

    @property
    def evaluations(self) -> list[dict[str, float]]:
        """A dict of metrics for each evaluation; `step` is the step before it, 0 before training."""
        return list(finished_lines("run_dir", self._folder / "evaluation.jsonl"))

    @property
    def parameters(self) -> dict[str, Any]:
        """All parameters, including defaults, nested as in the run folder's `parameters.yaml`.

        You can pass them to `run` again: `run("grpo", **result.parameters | {"seed": 2})`. Secrets are left out.
        """
        return read_parameters(self._folder)

    @property
    def version(self) -> str:
        """The prefect-rlhf version that ran it."""
        return RunRecord.read(self._folder).version

    @property
    def commit(self) -> str | None:
        """The prefect-rlhf commit that ran it, with `-dirty` if files differed; None for a wheel."""
        return RunRecord.read(self._folder).commit

    @property
    def rollouts(self) -> list[Path]:
        """The rollouts' Parquet files, one per step, in order; empty if the algorithm records no rollouts."""
        return self.rows(ROLLOUTS)

    def rows(self, folder: str) -> list[Path]:
        """Return the Parquet files that `write_rows` wrote below the run folder, in step order."""
        return step_files(self._folder, folder)


@dataclass(frozen=True, slots=True)
class PlannedRun:
    """What a dry run returns: the plan and its predicted step time."""

    plan: str
    """The plan's name."""
    steps: int
    """How many steps the run would take."""
    seconds_per_step: float | None
    """The predicted step time once steps repeat; None if the hardware is unknown."""
    plan_yaml: str
    """The plan as a plan file."""
    text: str
    """What a dry run prints in a terminal."""

    @classmethod
    def of(cls, prepared: PreparedRun) -> PlannedRun:
        """Return a prepared run's plan with its predicted step time."""
        augmented, prediction, steps = prepared.augmented, prepared.prediction, prepared.request.spec.steps
        seconds = None if prediction is None else prediction.seconds_per_step
        plan, graph = augmented.plan, augmented.graph
        lines = [
            f"plan {plan.name} for {augmented.graph.name}:",
            plan_text(plan, augmented.graph),
            "graph of a step:",
            graph_text(augmented),
            *([] if seconds is None else [f"predicted: {seconds:.3g} s per step once steps repeat"]),
            *(line for later in prepared.later for line in (later.announced, plan_text(later.augmented.plan, graph))),
            f"{steps} steps would run; no step was started",
        ]
        return cls(plan.name, steps, seconds, plan_yaml(plan), "\n".join(lines))

    def __str__(self) -> str:
        return self.text
