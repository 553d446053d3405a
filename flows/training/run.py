"""A flow run from top to bottom: lease, request, plan, augmented graph, training."""

import json
import shlex
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager, suppress
from contextvars import ContextVar
from dataclasses import asdict, dataclass, replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

from prefect.runtime import flow_run
from pydantic_core import to_jsonable_python

from prefect_rlhf.blocks.lease import dry_lease, given_lease, lease
from prefect_rlhf.errors.errors import InvalidInput, OutputFailed
from prefect_rlhf.files.atomic_file import write_atomically, writing
from prefect_rlhf.files.installed import own_version
from prefect_rlhf.files.path_text import from_here
from prefect_rlhf.files.processes.environment import hide
from prefect_rlhf.files.remote_path import local_path, shown
from prefect_rlhf.flows.forms.parameters_file import changed
from prefect_rlhf.flows.hardware.attention import attention_lines
from prefect_rlhf.flows.hardware.device_kind import check_leased_gpus, device_line, unheld_devices
from prefect_rlhf.flows.hardware.installed_engines import check_builds, check_engines
from prefect_rlhf.flows.hardware.living_nodes import on_living_nodes
from prefect_rlhf.flows.hardware.surroundings import check_surroundings
from prefect_rlhf.flows.training.choice.choose_plan import ChosenPlan
from prefect_rlhf.flows.training.choice.measured_plan import trials_json
from prefect_rlhf.flows.training.choice.plans_by_step import (
    PLANS_FILE,
    ChosenAt,
    choose_plans,
    in_effect,
    plans_yaml,
)
from prefect_rlhf.flows.training.host_fit import check_host
from prefect_rlhf.flows.training.log import LogLine, engines_in_log, kept_lines, log_info, log_warning, write_kept
from prefect_rlhf.flows.training.probed import SPEEDS, awaits_probe, with_speeds
from prefect_rlhf.flows.training.replan.plan_switcher import plan_switcher
from prefect_rlhf.flows.training.replan.predicted import later_plan, predict_run, predicted_by
from prefect_rlhf.flows.training.replan.price_check import RECHECKED, earlier_check, price_check
from prefect_rlhf.flows.training.request import RunRequest, read_request
from prefect_rlhf.flows.training.run_folder import (
    COMMITS,
    LATEST,
    RESULT,
    check_latest,
    earlier_folder,
    new_folder,
    read_commits,
    read_result,
)
from prefect_rlhf.flows.training.run_name import tag_run
from prefect_rlhf.flows.training.spec.place import FIELD
from prefect_rlhf.flows.training.spec.plan_choice import Measure
from prefect_rlhf.flows.training.spec.replanning import Switch
from prefect_rlhf.flows.training.spec.run_spec import AskedRun, asked_run, stated_parameters
from prefect_rlhf.flows.training.stopped import stopped_run
from prefect_rlhf.placement.augmented.augmented_graph import AugmentedGraph
from prefect_rlhf.placement.augmented.preview import preview
from prefect_rlhf.placement.cost.sizes import copied_bytes
from prefect_rlhf.placement.devices.lease import Lease
from prefect_rlhf.placement.devices.mesh import ClusterShape
from prefect_rlhf.placement.memory.bytes import byte_size
from prefect_rlhf.placement.plans.plan_file import plan_yaml
from prefect_rlhf.placement.plans.switch import PlanAt
from prefect_rlhf.placement.schedule.estimate import Prediction
from prefect_rlhf.tasks.checkpoints.best import carry_over_best, export_stored
from prefect_rlhf.tasks.checkpoints.elsewhere import publish, publish_record, writing_to
from prefect_rlhf.tasks.checkpoints.folders import Checkpoint, clear_unfinished, folder_of, newest_finished
from prefect_rlhf.tasks.checkpoints.lineage import CHANGES
from prefect_rlhf.tasks.reporting.model_card import CARD, model_card
from prefect_rlhf.tasks.reporting.report import LaterPlan, PlannedSteps, RunReport, planned_timeline
from prefect_rlhf.tasks.reporting.run_record import PARAMETERS, keep_parameters, new_record, recorded
from prefect_rlhf.tasks.running.journal import Journal
from prefect_rlhf.tasks.running.steps.learning import Learning
from prefect_rlhf.tasks.running.switch.requests import Switches
from prefect_rlhf.tasks.running.training_run import TrainingRun
from prefect_rlhf.tasks.server.failures import is_by_hand
from prefect_rlhf.tasks.server.task_run_record import complete_record
from prefect_rlhf.tasks.tracing.trace import Algorithm
from prefect_rlhf.tasks.trackers.follow import followed
from prefect_rlhf.tasks.trackers.tracking import check_trackers


@dataclass(frozen=True, slots=True)
class PreparedRun:
    """A checked and planned run. `prediction` is None if the hardware is unknown.

    `augmented` is the graph of its first steps. `plans` has its plans by step, `later` the plans that it switches to.
    """

    request: RunRequest
    chosen: ChosenPlan
    augmented: AugmentedGraph
    prediction: Prediction | None
    plans: tuple[ChosenAt, ...]
    later: tuple[LaterPlan, ...] = ()


@dataclass(frozen=True, slots=True)
class CheckedRun:
    """A run that was checked and planned before its lease, with the lines to log."""

    asked: AskedRun
    prepared: PreparedRun
    lines: Sequence[tuple[int, str]]

    def on(self, lease: Lease) -> PreparedRun:
        """Return the prepared run on the devices of `lease`."""
        request = self.prepared.request
        spec = replace(request.spec, dry_run=False)
        return replace(self.prepared, request=replace(request, lease=lease, spec=spec))


_checked: ContextVar[CheckedRun | None] = ContextVar("rlhf_checked_run", default=None)


def check_run(asked: AskedRun, cluster: ClusterShape) -> CheckedRun:
    """Check a run that will use all devices of `cluster`: as a dry run does, and the engines too.

    The devices' kind is the cluster's `backend`. Raises InvalidInput, GraphError, or RlhfError for a missing engine.
    """
    check_engines(cluster.backend)
    with kept_lines() as lines:
        prepared = prepare(asked.dry(), dry_lease(cluster, cluster.backend))
    return CheckedRun(asked, prepared, tuple(lines))


@contextmanager
def leased_after(checked: CheckedRun, say: LogLine, name: str) -> Iterator[Lease]:
    """Lease the devices that the run `name` was checked for.

    A run in the body reuses the earlier checks, unless it waited for devices: files may have changed meanwhile. `say`
    gets each reason for waiting.
    """
    waits: list[str] = []

    def note(line: str) -> None:
        waits.append(line)
        say(line)

    cluster = checked.prepared.request.lease.cluster
    kind = checked.prepared.request.lease.kind
    with lease(cluster, cluster.whole.num_devices, kind=kind, say=note, flow_run=name) as leased:
        token = _checked.set(None if waits else checked)
        try:
            yield leased
        finally:
            _checked.reset(token)


@engines_in_log()
def run_algorithm(algorithm: Algorithm, parameters: Mapping[str, Any]) -> Mapping[str, Any]:
    """Prepare a run of `algorithm`, then train. Returns its run folder and trained models, or the plan of a dry run.

    The form's `parameters` are parsed here; everything after works with typed values. A restarted flow run continues in
    its own folder from its newest checkpoint. If it had reached its end, for example before it was suspended, it does
    no more work.
    """
    check_builds()
    leased = given_lease() or unheld_devices()
    check_surroundings(leased.mesh.num_devices, own_leases=given_lease() is None)
    asked = asked_run(algorithm, parameters)
    dry_run, words = asked.spec.dry_run, str(asked.spec.plan)
    if not dry_run:
        check_engines(leased.kind)
        check_leased_gpus(leased)
    log_info(device_line(leased))
    tag_run(algorithm.name, asked.arguments, words)
    earlier = earlier_folder(asked.spec.place.folder, flow_run.name or "run", str(flow_run.id))
    if earlier is not None and (result := read_result(earlier)) is not None:
        log_info(f"{earlier} holds the finished run: no step is left")
        return result
    if earlier is not None:
        asked = asked.restarted(newest_finished(earlier), read_commits(earlier))
    with complete_record(), ExitStack() as held:
        if not dry_run and given_lease() is None:
            checked = check_run(asked, leased.cluster)
            leased = held.enter_context(leased_after(checked, log_info, flow_run.name or algorithm.name))
        leased, run_dir = on_living_nodes(leased, log_info), earlier or Path()

        def begin(request: RunRequest) -> None:
            nonlocal run_dir
            if not dry_run:
                stated = stated_parameters(algorithm, parameters)
                run_dir = held.enter_context(own_folder(algorithm, stated, request, earlier))

        prepared = prepare_leased(asked, leased, begin=begin)
        tag_run(algorithm.name, asked.arguments, words, prepared.chosen.plan.name)
        return carry_out(prepared, run_dir)


def carry_out(prepared: PreparedRun, run_dir: Path) -> Mapping[str, Any]:
    """Log what a run will do, and train unless it is a dry run; returns the result of `run_algorithm`."""
    request, prediction, later = prepared.request, prepared.prediction, prepared.later
    spec, plan = request.spec, prepared.chosen.plan
    planned = (PlanAt(each.step, each.augmented.plan) for each in later)
    switches = Switches(planned, may_ask=isinstance(spec.replanning, Switch))
    is_checked = len(prepared.plans) == 1 and not spec.dry_run
    check = price_check(request, plan, prediction) if is_checked else None
    switcher = None if spec.dry_run else plan_switcher(request, prepared.plans, prediction, switches)
    with ExitStack() as held:
        for each in (check, switcher):
            if each is not None:
                held.enter_context(closing(each))
        first = PlannedSteps(prepared.chosen.certificate, prepared.augmented, prediction)
        report = RunReport(first, request.lease, later=later, limits=spec.limits, check=check, switcher=switcher)
        report.planned(dry_run=spec.dry_run)
        if spec.dry_run:
            return {"plan": prepared.augmented.plan.name, "steps": spec.steps, "dry_run": True}
        return train_prepared(prepared, report, switches, run_dir)


def prepare_leased(asked: AskedRun, lease: Lease, begin: Callable[[RunRequest], None]) -> PreparedRun:
    """Prepare a run on its leased devices, reusing an earlier check on the same mesh.

    A run with `measure(k)`, or with devices that need a probe, is always prepared again, because both measure on the
    devices.
    """
    checked = _checked.get()
    if checked is None or checked.asked != asked:
        return prepare(asked, lease, begin=begin)
    was_for = checked.prepared.request.lease
    is_measured = isinstance(asked.spec.plan, Measure)
    is_same = (was_for.cluster, was_for.mesh, was_for.kind) == (lease.cluster, lease.mesh, lease.kind)
    if is_same and not is_measured and not awaits_probe((prepared := checked.on(lease)).request):
        write_kept(checked.lines)
        begin(prepared.request)
        return prepared
    warnings = checked.prepared.request.reward_warnings
    return prepare(asked, lease, reward_warnings=warnings, begin=begin)


def prepare(
    asked: AskedRun,
    lease: Lease,
    *,
    reward_warnings: tuple[str, ...] | None = None,
    begin: Callable[[RunRequest], None] = lambda request: None,
) -> PreparedRun:
    """Make all decisions before the first step. Raises InvalidInput or GraphError for an impossible run.

    This reads inputs, traces the graph, chooses a plan, proves that it fits into memory, and predicts the times of the
    first steps' task runs. Devices are used only by a probe before a search and by the plans of `measure(k)`, and never
    in a dry run. Rewards are not tried if `reward_warnings` are given. `begin` is called with the checked request
    before a device is used.
    """
    hide()  # before the first play, which could read the variables of this process
    check_trackers(asked.spec.tracking)
    request = read_request(asked, lease, reward_warnings=reward_warnings)
    begin(request)
    request = with_speeds(request)
    plans = choose_plans(request)
    finished = request.checkpoint.step if request.checkpoint else 0
    chosen, later = in_effect(plans, finished)
    check_host((chosen.certificate, *(each.chosen.certificate for each in later)), lease)
    for line in attention_lines(request.graph, [chosen.plan]) if lease.kind == "cuda" else ():
        log_info(line)
    spec = request.spec
    augmented = preview(request.graph, chosen.plan, spec.steps, finished, spec.checkpoint_every)
    if spec.checkpoint_every is not None:
        log_info(checkpoint_memory(augmented))
    prediction, turns = predict_run(request, augmented), pairwise((ChosenAt(finished + 1, chosen), *later))
    switches = tuple(later_plan(request, before.chosen.plan, after) for before, after in turns)
    return PreparedRun(request, chosen, augmented, prediction, plans, switches)


def checkpoint_memory(augmented: AugmentedGraph) -> str:
    """Return the log line about host memory for checkpoints: one copy at a time, however long writing takes."""
    copied = copied_bytes(augmented.graph, augmented.plan)
    most = byte_size(max(copied.values(), default=0))
    return f"checkpoints: a single copy in host memory takes {byte_size(copied.total())}, at most {most} per device"


@contextmanager
def own_folder(
    algorithm: Algorithm, stated: Mapping[str, Any], request: RunRequest, earlier: Path | None
) -> Iterator[Path]:
    """Yield the flow run's folder (`earlier` if it exists), with its `stated` parameters and its record.

    When the body ends, the record says how the run ended.
    """
    run_dir = earlier or new_folder(request.spec.place.folder, flow_run.name or "run", str(flow_run.id))
    checkpoint, devices = request.checkpoint, request.lease.mesh.num_devices
    is_other = earlier is None and checkpoint is not None
    came_from = checkpoint.folder.parent.parent if checkpoint is not None and is_other else None
    if checkpoint is not None and is_other:  # `latest` will be another checkpoint
        stated = {**stated, "resume_from": shown(checkpoint.folder)}
    words = ["prefect-rlhf", "run", algorithm.word or "", "--parameters", from_here(shown(run_dir / PARAMETERS))]
    command = shlex.join([*words, *(["--devices", str(devices)] if devices > 1 else [])]) if algorithm.word else None
    record = new_record(algorithm.name, command, own_version(), request.spec.steps)
    with recorded(run_dir, record):
        keep_parameters(run_dir, record, stated, changed, came_from)
        yield run_dir


def train_prepared(prepared: PreparedRun, report: RunReport, switches: Switches, run_dir: Path) -> Mapping[str, Any]:
    """Train in the flow run's folder; returns the folder and the trained models."""
    with writing_to(run_dir):
        return train_in(run_dir, prepared, report, switches)


def train_in(run_dir: Path, prepared: PreparedRun, report: RunReport, switches: Switches) -> Mapping[str, Any]:
    """Train in a folder that no other process writes; returns the result of `train_prepared`."""
    from prefect_rlhf.tasks.running.train import train  # imported here: a dry run needs no engine

    request, spec = prepared.request, prepared.request.spec
    clear_unfinished(run_dir)
    run = request.training_run(prepared.chosen.plan, run_dir)
    journal = open_journal(run_dir, prepared, report.later)
    report.started(journal)
    before = journal.go_on_after(*_begin(request.checkpoint, run_dir))
    if run.best is not None:
        carry_over_best(run.best, _begin(request.checkpoint, run_dir)[1], run_dir)
    learning = Learning(run.graph, spec.most_empty_steps, spec.limits)
    learning.go_on(before)
    report.resumed(run, before, learning.warnings)
    parameters = to_jsonable_python(flow_run.parameters, fallback=str)
    try:
        with followed(journal, before, spec.tracking, parameters, log_warning):
            stop = train(run, journal, report, spec.steps_per_group, switches, learning)
        if stop is not None and not stop.is_end:
            stop.leave()
    except BaseException as error:  # also a cancellation
        clear_unfinished(run_dir)
        with suppress(OutputFailed):  # the error that ended the run matters more
            publish_record(run_dir)
        if is_by_hand(error):
            raise stopped_run(run, error) from None
        report.stopped(run, error)
        raise
    report.finished()
    link_latest(run_dir)
    found = {**outcome(run, str(stop) if stop else None), "warnings": learning.warnings}
    write_cards(run, found)
    result = {"run_dir": shown(run_dir), **found}
    journal.keep(RESULT, json.dumps(result))
    publish_record(run_dir)
    return result


def link_latest(run_dir: Path) -> None:
    """Link `latest` to the folder of a run that has ended; a file or folder of this name is left alone."""
    try:
        check_latest(run_dir.parent)
        write_atomically(run_dir.parent / LATEST, lambda part: part.symlink_to(run_dir.name))
    except InvalidInput as error:
        log_warning(str(error))


def _begin(checkpoint: Checkpoint | None, run_dir: Path) -> tuple[int, Path]:
    """Return the number of steps before the run begins, and the folder of the run that trained them."""
    return (0, run_dir) if checkpoint is None else (checkpoint.step, checkpoint.folder.parent.parent)


def open_journal(run_dir: Path, prepared: PreparedRun, later: Sequence[LaterPlan]) -> Journal:
    """Begin the run's record with its decisions: plan, certificate, planned timeline, measured plans."""
    chosen, prediction = prepared.chosen, prepared.prediction
    predicted_seconds = predicted_by(prediction, later)
    journal = Journal(run_dir, predicted_seconds, prepared.request.graph)
    journal.keep("plan.yaml", plan_yaml(chosen.plan))
    journal.keep("certificate.json", chosen.certificate.to_json())
    if changes := prepared.request.lineage.changes:
        journal.keep(CHANGES, json.dumps([asdict(change) for change in changes], indent=1))
    if commits := prepared.request.lineage.commits:
        journal.keep(COMMITS, json.dumps(commits, indent=2))
    if prepared.request.speeds:
        journal.keep(SPEEDS, prepared.request.speeds.to_json())
    if earlier := earlier_check(prepared.request):
        journal.keep(RECHECKED, json.dumps(earlier, indent=1))
    if len(prepared.plans) > 1 or isinstance(prepared.request.spec.replanning, Switch):
        journal.keep(PLANS_FILE, plans_yaml(prepared.plans))
    if prediction:
        journal.keep("plan.svg", planned_timeline(prediction))
    if chosen.trials:
        journal.keep("measured_plans.json", trials_json(chosen.trials))
    return journal


def outcome(run: TrainingRun, ended_early: str | None) -> dict[str, Any]:
    """Return a run's models, its best model if it has a `best_metric`, and why it ended early, if it did."""
    found: dict[str, Any] = {"models": trained_models(run) if ended_early is None else {}}
    best = run.best.best(run.run_dir) if run.best else None
    if ended_early is not None:
        found["ended_early"] = ended_early
        log_info(f"ended early: {ended_early}")
    if run.best is None or best is None:
        return found
    found["best"] = {"metric": run.best.metric, "value": best.value, "step": best.step}
    log_info(f"best {run.best.metric}: {best.value:.4g} after {best.step} steps")
    if ended_early is not None or best.step < run.num_steps:
        found["models"] = best_models(run, folder_of(run.run_dir, best.step))
    return found


def write_cards(run: TrainingRun, found: Mapping[str, Any]) -> None:
    """Write a model card into each model's folder."""
    steps = found["best"]["step"] if "best" in found else run.num_steps
    for role, folder in found["models"].items():
        file = local_path(folder, FIELD) / CARD
        card = model_card(run.graph.model(role), run.graph.name, steps, run.run_dir.name)
        with writing(file):
            file.parent.mkdir(exist_ok=True)  # another machine may have written the model to a store
            write_atomically(file, partial(_write_text, card))
        publish(file)


def _write_text(text: str, file: Path) -> None:
    file.write_text(text, encoding="utf-8")


def best_models(run: TrainingRun, checkpoint: Path) -> dict[str, str]:
    """Write the trained models of a checkpoint as Hugging Face folders; return them by role."""
    specs = [model for model in run.graph.models if run.graph.trained_by(model.role)]
    for spec in specs:
        with writing(run.run_dir / "best" / spec.role):
            (run.run_dir / "best").mkdir(exist_ok=True)
            export_stored(checkpoint, spec, run.run_dir / "best" / spec.role, run.export_merged)
    return {spec.role: shown(run.run_dir / "best" / spec.role) for spec in specs}


def trained_models(run: TrainingRun) -> dict[str, str]:
    """Return the exported models' folders by role."""
    roles = [model.role for model in run.graph.models if run.graph.trained_by(model.role)]
    return {role: shown(run.run_dir / role) for role in roles}
