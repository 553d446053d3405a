"""A run request, read and checked: its inputs, its graph, and the checkpoint to continue from."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from prefect_rlhf.errors.errors import InvalidInput
from prefect_rlhf.flows.hardware.profiles import measured_sources
from prefect_rlhf.flows.training.inputs import RunInputs, at_commits, read_run_inputs
from prefect_rlhf.flows.training.log import log_info, log_warning
from prefect_rlhf.flows.training.run_folder import check_output_folder, read_result
from prefect_rlhf.flows.training.spec.place import Resume, RunPlace
from prefect_rlhf.flows.training.spec.plan_choice import PlanFile, PlansByStep
from prefect_rlhf.flows.training.spec.replanning import Switch
from prefect_rlhf.flows.training.spec.run_spec import AskedRun, RunSpec
from prefect_rlhf.flows.training.spec.steps import falling_over, with_steps
from prefect_rlhf.flows.training.tokenizers import check_model_settings, check_play_templates, check_tokenizers
from prefect_rlhf.flows.training.workload import run_workload
from prefect_rlhf.placement.cost.sources import CostSources
from prefect_rlhf.placement.cost.speeds import KnownSpeeds
from prefect_rlhf.placement.cost.workload import Workload
from prefect_rlhf.placement.devices.lease import Lease
from prefect_rlhf.placement.graph import DataflowGraph
from prefect_rlhf.placement.memory.room import with_room
from prefect_rlhf.placement.plan import ExecutionPlan
from prefect_rlhf.placement.planner.question import Question, Site
from prefect_rlhf.placement.plans.stated_words import check_calls, names_of
from prefect_rlhf.placement.rows.tokenizers import Tokenizers
from prefect_rlhf.tasks.checkpoints.changes import ResumedRun
from prefect_rlhf.tasks.checkpoints.folders import Checkpoint, check_resumable, checkpoint_in, newest_checkpoint
from prefect_rlhf.tasks.checkpoints.frozen_models import check_frozen_models
from prefect_rlhf.tasks.checkpoints.lineage import Lineage, parameters_of
from prefect_rlhf.tasks.checkpoints.metric_names import hint, metric_names
from prefect_rlhf.tasks.checkpoints.run_identity import run_identity, with_defaults
from prefect_rlhf.tasks.data.role_tokenizers import tokenizers_of
from prefect_rlhf.tasks.data.rows.row_order import items_read
from prefect_rlhf.tasks.running.training_run import TrainingRun
from prefect_rlhf.tasks.settings import Optimizer
from prefect_rlhf.tasks.tracing.heads import adapter_remarks


@dataclass(frozen=True)
class RunRequest:
    """A checked request for a run.

    The lease's cluster gets the headroom of `spec`, or the usual headroom. Raises InvalidInput if no memory is left.
    """

    spec: RunSpec
    lease: Lease
    inputs: RunInputs
    graph: DataflowGraph
    workload: Workload
    checkpoint: Checkpoint | None
    """What the run continues from; None starts at step 1."""
    lineage: Lineage = field(default_factory=Lineage)
    speeds: KnownSpeeds | None = None
    """Probed speeds of the lease's devices."""
    reward_warnings: tuple[str, ...] = ()
    """From trying the rewards."""

    def __post_init__(self) -> None:
        cluster = with_room(self.lease.cluster, self.spec.headroom, self.lease.kind)
        object.__setattr__(self, "lease", replace(self.lease, cluster=cluster))

    @cached_property
    def cost_sources(self) -> CostSources:
        """Times of the lease's devices, read on first use. Raises InvalidInput for unknown hardware."""
        return measured_sources(self.graph.models, self.lease, self.speeds)

    @cached_property
    def tokenizers(self) -> Tokenizers:
        """The roles' tokenizers. Raises InvalidInput for a tokenizer that cannot be read."""
        return tokenizers_of(self.graph)

    @property
    def question(self) -> Question:
        """The planning question for this run. Raises InvalidInput for unknown hardware."""
        return Question(self.graph, Site.of_lease(self.lease, self.cost_sources), self.workload)

    def training_run(self, plan: ExecutionPlan, run_dir: Path) -> TrainingRun:
        """Return the values that stay fixed while the run trains under `plan`."""
        return TrainingRun(
            graph=self.graph,
            plan=plan,
            num_steps=self.spec.steps,
            lease=self.lease,
            sources=self.inputs.sources,
            tokenizers=self.tokenizers,
            run_dir=run_dir,
            seed=self.spec.seed,
            max_sequence_length=self.workload.longest,
            call_deadline_seconds=self.spec.call_deadline_seconds,
            checkpoint=self.checkpoint,
            checkpoint_every=self.spec.checkpoint_every,
            keep_checkpoints=self.spec.keep_checkpoints,
            best=self.spec.best,
            export_merged=self.spec.export_merged,
            role_deadlines=self.spec.role_deadlines,
            start_deadline_seconds=self.spec.start_deadline_seconds,
            lineage=self.lineage,
        )

    def trial_run(self, graph: DataflowGraph, plan: ExecutionPlan, num_steps: int, folder: Path) -> TrainingRun:
        """Return a run of the first `num_steps` steps on part of the graph, without a checkpoint; it exports no
        model.
        """
        run = self.training_run(plan, folder)
        alone = replace(run, checkpoint=None, checkpoint_every=None, exports=False, best=None)
        return replace(alone, graph=graph, num_steps=num_steps)


def read_request(asked: AskedRun, lease: Lease, *, reward_warnings: tuple[str, ...] | None = None) -> RunRequest:
    """Read inputs and graph, and try an author's own operators. Raises InvalidInput or GraphError if they cannot run.

    A run that did not reach its end may continue from a checkpoint of its last step, because the work after that step
    is missing. Rewards are tried, unless their warnings are given or the run is restarted. Without a checkpoint, a
    repository on the Hub is read at the same commit as in an earlier attempt at this run.
    """
    algorithm, spec = asked.algorithm, asked.spec
    checkpoint = None if spec.resume is None else find_checkpoint(spec.resume, spec.place)
    arguments, commits = at_commits(
        asked.arguments, checkpoint.manifest.lineage.commits if checkpoint else asked.commits
    )
    inputs = replace(read_run_inputs(arguments), commits=commits)
    graph = algorithm.trace(arguments, inputs.models, inputs.datasets)
    spec = with_steps(spec, graph)
    graph = falling_over(graph, spec.steps)
    check_names(spec, graph)
    check_may_switch(spec, graph)
    if spec.best is not None:
        spec.best.check(graph, spec.checkpoint_every, spec.keep_checkpoints)
    if spec.export_merged and not any(model.adapter and graph.trained_by(model.role) for model in graph.models):
        raise InvalidInput("export_merged", True, "false: no trained model has an adapter")
    if line := untrained(graph):
        log_warning(line)
    for line in check_tokenizers(graph):
        log_warning(line)
    tokenizers = tokenizers_of(graph)
    check_play_templates(graph, tokenizers)
    check_model_settings(graph, tokenizers.speaks, arguments)
    inputs = inputs.read_by(tokenizers.speaks).checked(items_read(graph, spec.steps, spec.seed))
    for line in inputs.warnings():
        log_warning(line)
    for line in (*inputs.remarks, *adapter_remarks(graph)):
        log_info(line)
    workload = replace(
        run_workload(graph, inputs, spec.expected_response_length),
        has_checkpoints=spec.checkpoint_every is not None,
    )
    lineage = read_lineage(AskedRun(algorithm, arguments, spec), inputs, graph, checkpoint)
    check_output_folder(spec, graph, checkpoint.folder if checkpoint and spec.is_restart else None)
    if any(call.on_hosts or call.play is not None for call in graph):
        found = check_functions(graph, inputs, spec.seed, calls=not spec.is_restart and reward_warnings is None)
        reward_warnings = found if reward_warnings is None else reward_warnings
    for line in reward_warnings or ():
        log_warning(line)
    if spec.dry_run and any(call.play is not None for call in graph):
        check_plays(graph, inputs, tokenizers)
    check_operators(spec, graph, inputs, tokenizers, is_own=not algorithm.is_shipped)
    return RunRequest(spec, lease, inputs, graph, workload, checkpoint, lineage, reward_warnings=reward_warnings or ())


def read_lineage(asked: AskedRun, inputs: RunInputs, graph: DataflowGraph, checkpoint: Checkpoint | None) -> Lineage:
    """Return this run's lineage, which includes the run that wrote the checkpoint, if any.

    Raises InvalidInput if the checkpoint's run differs from this run, apart from its `resume_changes`.
    """
    arguments, spec = asked.arguments, asked.spec
    if checkpoint is None:
        return Lineage(parameters_of(arguments), commits=dict(inputs.commits))
    before = checkpoint.manifest

    def identity_of(others: Mapping[str, Any]) -> dict[str, Any]:
        traced = falling_over(asked.algorithm.trace(others, inputs.models, inputs.datasets), spec.steps)
        return run_identity(traced, spec.seed, spec.checkpoint_every)

    saved = with_defaults(before.identity, graph)
    resumed = ResumedRun(checkpoint, saved, arguments, identity_of, optimizer_parameters(graph, arguments))
    changes, identity = resumed.changes(spec.resume_changes)
    has_ended = read_result(checkpoint.folder.parent.parent) is not None
    check_resumable(checkpoint, graph, identity, spec.steps, has_ended)
    check_frozen_models(checkpoint, graph)
    lineage = Lineage(parameters_of(arguments), (*before.lineage.changes, *changes), dict(inputs.commits))
    for change in lineage.changes:
        log_info(str(change))
    return lineage


def find_checkpoint(resume: Resume, place: RunPlace) -> Checkpoint:
    """Return the checkpoint that a run continues from. Raises InvalidInput if it is missing."""
    return newest_checkpoint(place.folder) if resume.folder is None else checkpoint_in(resume.folder)


def optimizer_parameters(graph: DataflowGraph, arguments: Mapping[str, Any]) -> dict[str, str]:
    """Return the parameter that sets each trained role's optimizer, as shipped algorithms name it.

    For the actor it is `algo.actor_optimizer`, or `algo.optimizer` if the algorithm trains a single model.
    """
    roles, algo = [model.role for model in graph.models if graph.trained_by(model.role)], arguments.get("algo")
    names = {role: (f"{role}_optimizer", *(["optimizer"] if len(roles) == 1 else [])) for role in roles}
    found = {
        role: [one for one in words if isinstance(getattr(algo, one, None), Optimizer)] for role, words in names.items()
    }
    return {role: f"algo.{words[0]}" for role, words in found.items() if words}


RECORDS = ("record_evaluation", "record_rollouts", "record_set")
"""Computations that write files. A run that trains no model has these as its purpose."""


def untrained(graph: DataflowGraph) -> str:
    """Return a warning for a body that neither trains nor evaluates; empty for any other."""
    if any(call.kind == "train_step" or call.operation.name in RECORDS for call in graph):
        return ""
    return f"{graph.name} has no train_step: no weights change; train_step(actor, LOSS(algo).on(rows)) trains"


def check_names(spec: RunSpec, graph: DataflowGraph) -> None:
    """Raise InvalidInput for settings of a role or call that the algorithm lacks, since they would never apply."""
    check_calls(spec.words, graph)
    roles, calls = {call.role: None for call in graph if call.role}, {call.name for call in graph}
    for role in spec.role_deadlines:
        if role not in roles:
            raise InvalidInput("role_deadlines", role, f"a role with calls: {', '.join(roles)}")
    for metric in spec.limits:
        call, _, name = metric.rpartition(".")
        if call not in calls:
            raise InvalidInput("limits", metric, f"a metric of a call: {', '.join(f'{name}.*' for name in calls)}")
        if (names := metric_names(graph.call(call))).excludes(name):
            known = [f"{call}.{each}" for each in names.known]
            raise InvalidInput("limits", metric, hint(metric, f"{call} has", known))


def check_may_switch(spec: RunSpec, graph: DataflowGraph) -> None:
    """Raise InvalidInput for `replan: switch` in a run that cannot switch plans."""
    if not isinstance(spec.replanning, Switch):
        return
    if spec.words:
        call, word = min(names_of(spec.words))
        right = f"say or off with placement.{call}.{word}: a run that switches plans chooses it"
        raise InvalidInput("replan", "switch", right)
    if isinstance(spec.plan, PlanFile | PlansByStep):
        raise InvalidInput("replan", "switch", "say or off with a plan file or plans by step, which pin the plan")
    if graph.staleness and spec.checkpoint_every is None:
        right = "a number of steps: with staleness a run can change its plan only after a checkpoint"
        raise InvalidInput("checkpoint_every", None, right)


def check_functions(graph: DataflowGraph, inputs: RunInputs, seed: int, *, calls: bool) -> tuple[str, ...]:
    """Import each play and each reward function in a process of its own, and call the rewards on a few rows.

    Returns a line for each reward that fails on a made-up response. Without `calls`, rewards are only imported. Raises
    InvalidInput for an invalid function.
    """
    from prefect_rlhf.tasks.trial.check_plays import check_play_functions  # imported here: planning starts no process
    from prefect_rlhf.tasks.trial.try_rewards import try_rewards

    check_play_functions(graph)
    return tuple(try_rewards(graph, inputs.sources, seed, items=inputs.checked_items, calls=calls))


def check_plays(graph: DataflowGraph, inputs: RunInputs, tokenizers: Tokenizers) -> None:
    """Play two rows of each play twice; warn if a play fails, or if its two results differ."""
    from prefect_rlhf.tasks.trial.try_plays import try_plays  # imported here: planning starts no process

    for warning in try_plays(graph, inputs.sources, tokenizers):
        log_warning(warning)


def check_operators(
    spec: RunSpec, graph: DataflowGraph, inputs: RunInputs, tokenizers: Tokenizers, *, is_own: bool
) -> None:
    """Try the author's own operators in a separate process; for `best_metric`, also shipped operators that evaluate.

    Raises InvalidInput for an invalid operator, and for a `best_metric` that does not exist.
    """
    best = spec.best
    metrics: Mapping[str, Sequence[str]] = {}
    if find_spec("torch") is None:  # only a dry run continues without torch
        if is_own:
            log_warning("torch is not installed, so your own losses and computations are not tried")
    elif is_own or best is not None:
        # Imported here: planning needs no engine.
        from prefect_rlhf.tasks.trial.try_operators import evaluation_of, try_operators

        part = graph if is_own else evaluation_of(graph)
        tried = try_operators(part, inputs.sources, tokenizers, spec.start_deadline_seconds)
        for warning in tried.warnings:
            log_warning(warning)
        metrics = tried.metrics
    if best is not None and (doubt := best.check_metric(graph, metrics)):
        log_warning(doubt)
