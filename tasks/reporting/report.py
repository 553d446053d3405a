"""A run's report: plan, progress, metrics and timeline as Prefect artifacts, and a log line for each step."""

import logging
from base64 import b64encode
from collections import deque
from collections.abc import Mapping, Reversible, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol
from uuid import UUID

from prefect.artifacts import (
    create_markdown_artifact,
    create_progress_artifact,
    create_table_artifact,
    update_progress_artifact,
)

from prefect_rlhf.errors.errors import InvalidInput, OutputFailed
from prefect_rlhf.files.remote_path import shown
from prefect_rlhf.placement.augmented.augmented_graph import AugmentedGraph
from prefect_rlhf.placement.devices.lease import Lease
from prefect_rlhf.placement.memory.certificate import Certificate
from prefect_rlhf.placement.plan import ModelInstance
from prefect_rlhf.placement.plans.plan_file import plan_yaml
from prefect_rlhf.placement.schedule.estimate import Prediction
from prefect_rlhf.tasks.checkpoints.folders import newest_finished
from prefect_rlhf.tasks.reporting.comparison import compare, comparison_rows
from prefect_rlhf.tasks.reporting.conversations import conversations_markdown, newest_evaluation
from prefect_rlhf.tasks.reporting.history import History
from prefect_rlhf.tasks.reporting.limits import Limits
from prefect_rlhf.tasks.reporting.memory import FILE, MeasuredMemory
from prefect_rlhf.tasks.reporting.pictures.curves import curves_svg
from prefect_rlhf.tasks.reporting.pictures.dataflow import dataflow_svg
from prefect_rlhf.tasks.reporting.pictures.plan import schedule_bars
from prefect_rlhf.tasks.reporting.pictures.speeds import iteration_text, with_speeds
from prefect_rlhf.tasks.reporting.pictures.text import graph_text, plan_rows, plan_text
from prefect_rlhf.tasks.reporting.pictures.timeline import Bar, timeline_svg
from prefect_rlhf.tasks.reporting.publish import Page, publish
from prefect_rlhf.tasks.reporting.sample_page import sample_page
from prefect_rlhf.tasks.reporting.samples import sample_lines
from prefect_rlhf.tasks.reporting.step_line import StepLines
from prefect_rlhf.tasks.reporting.turns import turn_rows
from prefect_rlhf.tasks.rl.evaluation.table import newest_sets
from prefect_rlhf.tasks.run_log import run_log
from prefect_rlhf.tasks.running.journal import STEPS_KEPT, Journal, TaskRunSpan
from prefect_rlhf.tasks.running.outcome import NodeOutcome
from prefect_rlhf.tasks.running.steps.learning import Findings
from prefect_rlhf.tasks.running.training_run import TrainingRun
from prefect_rlhf.tasks.server.patience import not_waiting

PUBLISH_EVERY = 5  # steps between two versions of tables and timeline
MOST_PAGES = 100  # times that samples are shown during a run: a long run has many files to look through
ROWS_SHOWN = 50
COMPARED = (
    "Seconds of each node of a step: as the plan predicted them before the run, and their median over the last steps. "
    "A ratio of 1 is a right prediction, above 1 the node was faster."
)
STEPS_SHOWN = 3  # in the timeline: enough to see repetition and overlap


@dataclass(frozen=True, slots=True)
class PlannedSteps:
    """A run's steps under a plan: the plan's certificate, the graph of the first steps, and their prediction.

    The prediction is None if the hardware is unknown.
    """

    certificate: Certificate
    augmented: AugmentedGraph
    prediction: Prediction | None


@dataclass(frozen=True, slots=True)
class LaterPlan(PlannedSteps):
    """A later plan of a run: its steps, and the predicted time to switch to it.

    `assumed` has a line for each assumption behind `switch_seconds`, which is None if the hardware is unknown.
    """

    switch_seconds: float | None
    assumed: tuple[str, ...] = ()

    @property
    def step(self) -> int:
        """The plan's first step."""
        return self.augmented.finished + 1

    @property
    def announced(self) -> str:
        """A line that says when the run will switch, and to which plan."""
        line = f"before step {self.step} the run switches to plan {self.augmented.plan.name}"
        if self.prediction is None or self.switch_seconds is None:
            return line
        step = self.prediction.seconds_per_step
        assumed = f" (assumed: {', '.join(self.assumed)})" if self.assumed else ""
        return f"{line}: predicted {step:.3g} s per step, after a switch of {self.switch_seconds:.1f} s{assumed}"


class StepCheck(Protocol):
    """A check after each step of a run."""

    def step_ended(self, journal: Journal) -> str | None:
        """Return a line for the log, if the check has a result."""
        ...


class Switcher(StepCheck, Protocol):
    """A check that switches the run to a better plan."""

    def built(self, instance: ModelInstance, seconds: float) -> None:
        """Note how many seconds building an instance took."""
        ...

    def switches(self, run: TrainingRun) -> LaterPlan:
        """Return the plan to which the run switches now."""
        ...

    def switched(self, run: TrainingRun, journal: Journal) -> None:
        """Record the plan that the run has switched to."""
        ...


class RunReport:
    """Publishes artifacts of the current flow run. An unreachable server costs a picture, never the run."""

    def __init__(
        self,
        first: PlannedSteps,
        lease: Lease,
        *,
        later: Sequence[LaterPlan],
        limits: Mapping[str, float],
        check: StepCheck | None = None,
        switcher: Switcher | None = None,
    ) -> None:
        """Report a run whose `first` plan is followed by the `later` plans. `check` may add a line after a step."""
        self.lease, self.later = lease, list(later)
        self._now, self._check, self._switcher = first, switcher or check, switcher
        self._memory = MeasuredMemory(first.certificate, lease)
        self._log = run_log()
        evaluations = [call.name for call in first.augmented.graph.calls if call.every is not None]
        self._lines = StepLines(first.augmented.num_steps, evaluations)
        self._limits = Limits(limits)
        self._metrics: deque[Mapping[str, float]] = deque(maxlen=ROWS_SHOWN)
        self._journal: Journal | None = None
        self._progress: UUID | None = None
        self._share_done = 0.0
        self._history = History()
        self._curves = Page("curves", "Curves of metrics by step")
        self._warnings: list[str] = []
        self._warned = Page("warnings", "Warnings of this run")
        self._plays = any(call.play is not None and call.every is not None for call in first.augmented.graph.calls)
        self._shown_evaluation: Path | None = None
        self._samples = Page("samples", "Questions and answers")
        self._samples_due = 0  # the step after which they are shown next

    def planned(self, *, dry_run: bool = False) -> None:
        """Show the plan before the run starts: as artifacts and in a line; for a dry run as text, with the graph."""
        graph, plan, predicted = self._now.augmented.graph, self._now.augmented.plan, self._now.prediction
        if dry_run:
            self._log.info("plan %s for %s:\n%s", plan.name, graph.name, plan_text(plan, graph))
            self._log.info("graph of a step:\n%s", graph_text(self._now.augmented))
        took = f", predicted {predicted.seconds_per_step:.3g} s per step" if predicted and predicted.work else ""
        calls, number = len(graph.calls), len(self.lease.devices)
        devices = f"{number} device{'s' if number > 1 else ''}"
        self._log.info("%s: %d calls per step on %s by plan %s%s", graph.name, calls, devices, plan.name, took)
        self._show_plan()
        drawn = picture(dataflow_svg(graph), "dataflow graph")
        publish(create_markdown_artifact, drawn, key="graph", description=f"Dataflow graph of {graph.name}")
        if predicted is not None:
            drawn = picture(planned_timeline(predicted))
            text = f"{predicted.seconds_per_step:.3g} s per step in steady state\n\n{drawn}"
            publish(create_markdown_artifact, text, key="estimate", description="Predicted timeline")

        for later in self.later:
            self._log.info("%s", later.announced)
            if dry_run:
                self._log.info(
                    "plan %s for %s:\n%s", later.augmented.plan.name, graph.name, plan_text(later.augmented.plan, graph)
                )

    def switches(self, run: TrainingRun) -> None:
        """Note that a switch begins: from now on, devices may hold what the next plan keeps."""
        if self._switcher is not None:
            self.later.append(self._switcher.switches(run))
        self._warn_of_memory()  # what the last step reported belongs to the plan that ends
        self._memory = MeasuredMemory(self._later_from(run.finished + 1).certificate, self.lease, self._memory)

    def switched(self, run: TrainingRun, seconds: float) -> None:
        """Report a switch, and show the next plan instead of the previous."""
        self._now = later = self._later_from(run.finished + 1)
        if self._journal is not None:
            self._journal.keep("plan.yaml", plan_yaml(run.plan))
            self._journal.keep("certificate.json", later.certificate.to_json())
            if self._switcher is not None:
                self._switcher.switched(run, self._journal)
        said = "" if later.switch_seconds is None else f", predicted {later.switch_seconds:.1f} s"
        self._say(f"switched to plan {run.plan.name} before step {later.step} in {seconds:.1f} s{said}")
        self._show_plan()

    def _show_plan(self) -> None:
        """Publish the table of the plan, with the predicted speeds of its calls and of a step."""
        plan, predicted = self._now.augmented.plan, self._now.prediction
        rows, description = plan_rows(plan, self._now.augmented.graph), f"Plan {plan.name}"
        if predicted is not None and predicted.work is not None:
            rows = with_speeds(rows, predicted.speeds)
            description += f", predicted: {iteration_text(predicted.work, predicted.seconds_per_step)}"
        publish(create_table_artifact, rows, key="plan", description=description)

    def _later_from(self, step: int) -> LaterPlan:
        return next(later for later in self.later if later.step == step)

    def started(self, journal: Journal) -> None:
        """Show the run folder and a progress bar, and start to measure the memory of task runs."""
        self._journal = journal
        journal.watch(lambda span: self._memory.add(span, span.title))
        self._log.info("files of this run: %s", shown(journal.run_dir))
        description = f"{self._now.augmented.num_steps} steps of {self._now.augmented.graph.name}"
        created = publish(create_progress_artifact, 0.0, key="progress", description=description)
        self._progress = created if isinstance(created, UUID) else None

    def resumed(self, run: TrainingRun, metrics: Sequence[Mapping[str, float]], warnings: Sequence[str] = ()) -> None:
        """Report a resumed run's checkpoint and ignored files, and show the metrics and warnings of earlier steps."""
        if run.checkpoint is None:
            return
        checkpoint, (before, now) = run.checkpoint, (run.checkpoint.manifest.plan, plan_yaml(self._now.augmented.plan))
        under = "under the same plan" if before == now else "under another plan, so equal within rounding"
        self._log.info(
            "resume from %s: the run goes on at step %d, %s", shown(checkpoint.folder), run.finished + 1, under
        )
        for name in checkpoint.unfinished():
            self._log.info("%s was not finished and is ignored", checkpoint.folder.with_name(name))
        self._metrics.extend(metrics)
        for step in metrics:
            self._history.add(step)
        self._log.info("carried over the metrics of %d steps", sum(line["step"] > 0 for line in metrics))
        self._warn(warnings)

    def built(self, instance: ModelInstance, outcome: NodeOutcome) -> None:
        """Report that a model is built on its devices."""
        self._memory.add(outcome, f"build {instance.name}")
        if self._switcher is not None:
            self._switcher.built(instance, outcome.seconds)
        gib = max(outcome.device_bytes.values()) / (1 << 30)
        self._log.info("built %s in %.1f s; its devices hold up to %.2f GiB", instance.name, outcome.seconds, gib)

    def step_ended(self, metrics: Mapping[str, float], findings: Findings) -> None:
        """Log the step's line and warnings, update the progress bar, and publish the tables every few steps."""
        num_steps = self._now.augmented.num_steps
        self._metrics.append(metrics)
        self._history.add(metrics)
        if metrics["step"] == 0:
            self._say(self._lines.before_training(metrics))
            return
        self._say(self._lines.line(metrics, findings.phrase))
        self._log.debug("all metrics of step %d: %s", metrics["step"], " · ".join(values_by_call(metrics)))
        self._warn(findings.warnings)
        for line in self._limits.look(metrics):
            self._log.warning("%s", line)
        self._warn_of_memory()
        if self._check and self._journal and (found := self._check.step_ended(self._journal)):
            self._say(found)
        self._share_done = min(1.0, metrics["step"] / max(1, num_steps))
        with not_waiting():  # for an unreachable server: a later step publishes them again
            self._show_progress()
            self._show_conversations()
            if metrics["step"] >= self._samples_due:
                self._samples_due = int(metrics["step"]) + max(PUBLISH_EVERY, num_steps // MOST_PAGES)
                self._show_samples()
            if metrics["step"] % PUBLISH_EVERY == 0:
                self._publish()
            elif metrics["step"] < PUBLISH_EVERY:
                self._show_curves()

    def _warn(self, warnings: Sequence[str]) -> None:
        """Log warnings about learning, and publish them with those so far."""
        for line in warnings:
            self._say(line, logging.WARNING)
        self._warnings += warnings
        with not_waiting():
            self._show_warnings()

    def _show_warnings(self) -> None:
        """Publish the warnings so far, unless the server has them."""
        if self._warnings:
            self._warned.show("\n".join(f"- {line}" for line in self._warnings))

    def _show_progress(self) -> None:
        if self._progress is not None:
            publish(update_progress_artifact, self._progress, progress=100.0 * self._share_done)

    def stopped(self, run: TrainingRun, error: BaseException | None = None) -> None:
        """Log the checkpoint to resume from, unless `error` refuses that checkpoint."""
        with suppress(OutputFailed):  # the error that ended the run matters more
            self._keep_memory()
        with not_waiting():
            self._show_warnings()
        began = run.checkpoint.folder if run.checkpoint else None
        newest = newest_finished(run.run_dir) or began
        is_refused = isinstance(error, InvalidInput) and newest == began
        if newest is not None and not is_refused:
            self._log.info("%s is complete; to resume from it, set resume_from=%s", newest.name, shown(newest))

    def finished(self) -> None:
        """Publish progress, tables and pictures a last time, and show responses before and after training."""
        self._show_progress()
        self._show_warnings()
        self._publish()
        self._show_conversations()
        self._show_samples()
        assert self._journal is not None  # started before any step
        for line in sample_lines(self._journal.run_dir):
            self._say(line)

    def _say(self, line: str, level: int = logging.INFO) -> None:
        """Write a line of progress to the run's log, and to the file that `make demo` follows."""
        assert self._journal is not None  # started before any step
        self._journal.say(line)
        self._log.log(level, "%s", line)

    def _warn_of_memory(self) -> None:
        """Name devices beyond their certificate, once; the file that the line names then has their numbers."""
        if beyond := self._memory.excess():
            self._keep_memory()
            self._log.warning("%s", beyond)

    def _keep_memory(self) -> None:
        """Write the measured memory into the run's folder, where its certificate is."""
        if self._journal is not None:
            self._journal.keep(FILE, self._memory.to_json())

    def _publish(self) -> None:
        assert self._journal is not None  # started before any step
        self._keep_memory()
        memory = self._memory.rows()
        publish(
            create_table_artifact, memory, key="memory", description="Memory of each device, certified and measured"
        )
        rows = metric_rows(self._metrics)
        publish(create_table_artifact, rows, key="metrics", description="Metrics of each step")
        if rows := newest_sets(self._metrics):
            publish(create_table_artifact, rows, key="evaluation", description="Sets of prompts, newest evaluation")
        self._show_curves()
        publish(
            create_markdown_artifact,
            timeline_markdown(self._journal.last_steps(STEPS_SHOWN, with_switches=True)),
            key="timeline",
            description="Timeline",
        )
        if self._now.prediction is not None:
            first = self._now.augmented.finished + 1  # the steps before a switch had another plan
            spans = [span for span in self._journal.last_steps(STEPS_KEPT) if span.step >= first]
            rows = comparison_rows(compare(self._now.prediction, spans))
            publish(create_table_artifact, rows, key="predicted-and-measured", description=COMPARED)
        if rows := turn_rows(self._now.augmented.graph, self._metrics):
            publish(create_table_artifact, rows, key="turns", description="Turns of plays, expected and measured")

    def _show_conversations(self) -> None:
        """Publish conversations of the newest evaluation, if they are new."""
        assert self._journal is not None  # started before any step
        newest = newest_evaluation(self._journal.run_dir) if self._plays else None
        if newest is None or newest == self._shown_evaluation:
            return
        self._shown_evaluation, told = newest, conversations_markdown(newest)
        publish(create_markdown_artifact, told, key="conversations", description=f"Conversations of {newest.stem}")

    def _show_samples(self) -> None:
        """Replace the published questions and answers with those of the newest evaluation and step."""
        assert self._journal is not None  # started before any step
        if (told := sample_page(self._journal.run_dir)) is not None:
            self._samples.show(told)

    def _show_curves(self) -> None:
        """Replace the published curves with the curves so far."""
        self._curves.show(picture(curves_svg(self._history.curves(), self._history.bands()), "curves"))


def values_by_call(metrics: Mapping[str, float]) -> list[str]:
    """Return metrics as text: name and value. A name includes the call and is the same in every step."""
    shown = (name for name in metrics if not name.rpartition(".")[2].startswith("initial_"))
    return [f"{name} {metrics[name]:.4g}" for name in shown]


def metric_rows(steps: Reversible[Mapping[str, float]]) -> list[dict[str, str]]:
    """Return steps as table rows, newest first. Each row has all columns, because Prefect's pages use the first row's.

    >>> metric_rows([{"step": 1, "score": 0.25}, {"step": 2}])
    [{'step': '2', 'score': ''}, {'step': '1', 'score': '0.25'}]
    """
    names = dict.fromkeys(name for step in reversed(steps) for name in step)
    return [{name: _value_text(step.get(name, "")) for name in names} for step in reversed(steps)]


def _value_text(value: float | str) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def timeline_markdown(spans: tuple[TaskRunSpan, ...]) -> str:
    """Return task runs as a picture with a lane per device, in a form that Prefect's pages show."""
    bars = [Bar(_title(span), span.kind, span.devices, span.start, span.end) for span in spans]
    steps = [span.step for span in spans]
    return f"Steps {min(steps)} to {max(steps)}\n\n{picture(timeline_svg(bars))}"


def _title(span: TaskRunSpan) -> str:
    """Return the task run's name with its predicted seconds, shown on hovering."""
    return span.title if span.predicted_seconds is None else f"{span.title} · predicted {span.predicted_seconds:.3g} s"


def planned_timeline(predicted: Prediction) -> str:
    """Return the planned schedule of the first steps as SVG."""
    return timeline_svg(schedule_bars(predicted.schedule, STEPS_SHOWN))


def picture(svg: str, title: str = "timeline") -> str:
    """Return an SVG as Markdown."""
    return f"![{title}](data:image/svg+xml;base64,{b64encode(svg.encode()).decode()})"
