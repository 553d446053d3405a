"""A run request as values, parsed once from the form; only these are passed on."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from prefect_rlhf.errors.errors import NotUsed
from prefect_rlhf.flows.forms.evaluation import metric_name
from prefect_rlhf.flows.forms.form_flow import own_parameters
from prefect_rlhf.flows.forms.options import RunOptions
from prefect_rlhf.flows.forms.parameters_file import plain_parameters
from prefect_rlhf.flows.training.spec.place import Resume, RunPlace, read_place, read_resume
from prefect_rlhf.flows.training.spec.plan_choice import PlanChoice, read_plan_choice
from prefect_rlhf.flows.training.spec.replanning import Replanning, read_replanning
from prefect_rlhf.placement.plans.stated_words import Words
from prefect_rlhf.tasks.checkpoints.best import BestModel
from prefect_rlhf.tasks.tracing.trace import Algorithm
from prefect_rlhf.tasks.trackers.tracking import Tracking

NO_BEST_METRIC = "best_metric is not set"


@dataclass(frozen=True, slots=True)
class RunSpec:
    """Everything that you ask of a run, for any algorithm.

    `words` are the stated placement words of calls. `epochs` replaces `steps` until the data are read (`with_steps`).
    The other fields have the form's names and units.
    """

    place: RunPlace
    resume: Resume | None
    plan: PlanChoice
    replanning: Replanning | None
    best: BestModel | None
    steps: int
    epochs: int | None
    seed: int
    words: Words
    expected_response_length: str
    headroom: float | None
    checkpoint_every: int | None
    keep_checkpoints: int
    resume_changes: tuple[str, ...]
    most_empty_steps: int | None
    steps_per_group: int
    tracking: Tracking
    call_deadline_seconds: float
    role_deadlines: Mapping[str, float]
    start_deadline_seconds: float | None
    limits: Mapping[str, float]
    export_merged: bool = False
    dry_run: bool = False

    @property
    def is_restart(self) -> bool:
        """Whether this is a restarted run that continues from its own checkpoint."""
        return self.resume is not None and self.resume.is_own


@dataclass(frozen=True, slots=True)
class AskedRun:
    """A run of `algorithm` with the `arguments` for its body.

    `commits` are the commits that an earlier attempt at this run read from the Hub, by repository and branch.
    """

    algorithm: Algorithm
    arguments: Mapping[str, Any]
    spec: RunSpec
    commits: Mapping[str, str] = field(default_factory=dict)

    def dry(self) -> AskedRun:
        """Return the same run as a dry run: checks, plan and graph, but no steps."""
        return replace(self, spec=replace(self.spec, dry_run=True))

    def restarted(self, checkpoint: Path | None, commits: Mapping[str, str]) -> AskedRun:
        """Return the restarted run, which continues from its own `checkpoint` if that exists."""
        resume = self.spec.resume if checkpoint is None else Resume(checkpoint, is_own=True)
        return replace(self, spec=replace(self.spec, resume=resume), commits=commits)


def asked_run(algorithm: Algorithm, parameters: Mapping[str, Any]) -> AskedRun:
    """Return the run described by checked parameters. Raises InvalidInput for values that contradict each other."""
    options, arguments = RunOptions.split(parameters)
    return AskedRun(algorithm, arguments, read_spec(options))


def stated_parameters(algorithm: Algorithm, parameters: Mapping[str, Any]) -> dict[str, Any]:
    """Return a run's parameters, defaults included, as plain values for its record."""
    options, arguments = RunOptions.split(parameters)
    signature = inspect.Signature([*own_parameters(algorithm.body), *RunOptions.signature()])
    return plain_parameters(
        signature, {**arguments, **{name: getattr(options, name) for name in RunOptions.model_fields}}
    )


def read_spec(options: RunOptions) -> RunSpec:
    """Parse the form's options. Raises InvalidInput for a wrong value, and NotUsed for a value without effect."""
    _check_used(options)
    return RunSpec(
        place=read_place(options.output_dir),
        resume=read_resume(options.resume_from),
        plan=read_plan_choice(options.plan),
        replanning=read_replanning(options),
        best=_best_model(options),
        steps=options.steps,
        epochs=options.epochs,
        seed=options.seed,
        words=options.stated_words,
        expected_response_length=options.expected_response_length,
        headroom=options.headroom,
        checkpoint_every=options.checkpoint_every,
        keep_checkpoints=options.keep_checkpoints,
        resume_changes=options.resume_changes,
        most_empty_steps=options.most_empty_steps,
        steps_per_group=options.steps_per_group,
        tracking=options.tracking,
        call_deadline_seconds=options.call_deadline_seconds,
        role_deadlines=options.role_deadlines,
        start_deadline_seconds=options.start_deadline_seconds,
        limits={metric_name(name): limit for name, limit in options.limits.items()},
        export_merged=options.export_merged,
        dry_run=options.dry_run,
    )


def _check_used(options: RunOptions) -> None:
    """Raise NotUsed for `steps` with `epochs`, and for settings of checkpoints in a run without any."""
    fields = RunOptions.model_fields
    if options.epochs is not None and options.steps != fields["steps"].default:
        raise NotUsed("steps", options.steps, "epochs sets the number of steps", "remove epochs")
    if options.resume_changes and options.resume_from is None:
        reason = "only a resumed run can change parameters"
        raise NotUsed("resume_changes", ",".join(options.resume_changes), reason, "set resume_from")
    if options.checkpoint_every is None and options.keep_checkpoints != fields["keep_checkpoints"].default:
        reason = "without checkpoint_every a run writes no checkpoints"
        raise NotUsed("keep_checkpoints", options.keep_checkpoints, reason, "set checkpoint_every")


def _best_model(options: RunOptions) -> BestModel | None:
    """Return the rule for the best model, or None without `best_metric`. Raises NotUsed for settings that need it."""
    if options.best_metric is None:
        if options.patience is not None:
            raise NotUsed("patience", options.patience, NO_BEST_METRIC, "set best_metric")
        if options.best_is != RunOptions.model_fields["best_is"].default:
            raise NotUsed("best_is", options.best_is, NO_BEST_METRIC, "set best_metric")
        return None
    return BestModel(metric_name(options.best_metric), options.best_is == "highest", options.patience)
