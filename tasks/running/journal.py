"""The run's own record on disk, written while it runs: a JSON line per task run and per step.

Prefect's database serves the UI. Benchmarks, timelines and resumed runs read this record.
"""

from __future__ import annotations

import json
import threading
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

from prefect_rlhf.errors.errors import InvalidInput
from prefect_rlhf.files.atomic_file import write_atomically, writing
from prefect_rlhf.files.foreign_file import finished_lines
from prefect_rlhf.placement.augmented.node import BEHIND, SWITCH
from prefect_rlhf.placement.devices.lease import Lease
from prefect_rlhf.placement.devices.mesh import Device
from prefect_rlhf.placement.graph import DataflowGraph
from prefect_rlhf.tasks.checkpoints.best import EVALUATIONS
from prefect_rlhf.tasks.data.rollouts import carry_over_rollouts, remove_rollouts_after
from prefect_rlhf.tasks.running.outcome import NodeOutcome, mean_metrics

TASK_RUNS = "task_runs.jsonl"  # a line for each task run
PROGRESS = "progress.log"  # a line for each step, and responses before and after
STEPS_KEPT = 10  # number of finished steps whose task runs stay in memory
MODEL_FUNCTION_CALLS = frozenset({"generate", "inference", "train_step"})


@dataclass(frozen=True, slots=True)
class TaskRunSpan(NodeOutcome):
    """A task run as measured.

    `seconds` is the longest working time of any rank by its own clock; the rest is orchestration.
    """

    node: str
    title: str
    kind: str
    call: str | None
    step: int
    pool: str
    lease: str
    devices: tuple[str, ...]
    start: float
    """In Unix seconds by the controller's clock, as `end`."""
    end: float
    reads: int | None = None
    """The weight version that it reads, as the ranks verified it."""
    writes: int | None = None
    """The weight version that it writes, verified too."""
    predicted_seconds: float | None = None
    """Set if the plan was estimated."""
    depends_on: tuple[str, ...] = ()
    """The nodes before it."""


def measured_on(
    lease: Lease, devices: Iterable[Device], seconds: tuple[float, float], outcome: NodeOutcome
) -> dict[str, Any]:
    """Return the measured fields of a span: devices, start, end and outcome."""
    start, end = seconds
    where = {"pool": lease.pool, "lease": lease.id, "devices": tuple(map(str, sorted(devices)))}
    return {**asdict(outcome), **where, "start": start, "end": end}


class Journal:
    """Appends to `task_runs.jsonl`, `metrics.jsonl` and `evaluation.jsonl` in `run_dir`, from any thread.

    `graph` determines the order of calls and the evaluation calls.
    """

    def __init__(
        self,
        run_dir: Path,
        predicted_seconds: Callable[[str], float | None] = lambda node: None,
        graph: DataflowGraph | None = None,
    ) -> None:
        with writing(run_dir):
            run_dir.mkdir(parents=True, exist_ok=True)
        self.run_dir = run_dir
        self._predicted_seconds = predicted_seconds  # of a node, by its id
        calls = graph.calls if graph else ()
        self._position = {call.name: position for position, call in enumerate(calls)}
        self._evaluations = frozenset(call.name for call in calls if call.every is not None)
        self._by_step: dict[int, list[TaskRunSpan]] = defaultdict(list)
        self._finished: deque[int] = deque()  # of the steps in `_by_step`
        self._followers: list[Callable[[Mapping[str, float]], None]] = []
        self._watchers: list[Callable[[TaskRunSpan], None]] = []
        self._lock = threading.Lock()

    def keep(self, name: str, text: str) -> None:
        """Write a file in the run folder atomically."""
        write_atomically(self.run_dir / name, lambda part: part.write_text(text, encoding="utf-8"))

    def go_on_after(self, last_step: int, earlier: Path) -> list[Mapping[str, float]]:
        """Copy an earlier run's records of steps up to `last_step`, if its folder still exists.

        `earlier` may be this run's own folder. Its records of later steps are deleted, because the run repeats these
        steps (with `last_step` 0, all). Returns the metrics of the steps, beginning with step 0. A step is written
        after its task runs, so a kill may lose the last step, which is then rebuilt from its task runs.
        """
        if last_step == 0:
            last_step = -1  # the evaluation before training is made again
        metrics = _of_steps_until(last_step, earlier / "metrics.jsonl")
        evaluations = _of_steps_until(last_step, earlier / EVALUATIONS)
        for evaluation, lost in self._lost(range(_end(metrics), last_step + 1), earlier):
            metrics += [lost] if lost["step"] > 0 else []
            evaluations += [evaluation] if evaluation and evaluation["step"] >= _end(evaluations) else []
        self.keep("metrics.jsonl", _lines(metrics))
        if evaluations:
            self.keep(EVALUATIONS, _lines(evaluations))
        elif earlier == self.run_dir:
            (earlier / EVALUATIONS).unlink(missing_ok=True)
        if earlier == self.run_dir:
            self.keep(TASK_RUNS, _lines(_of_steps_until(last_step, earlier / TASK_RUNS)))
            remove_rollouts_after(earlier, last_step)
        else:
            carry_over_rollouts(earlier, self.run_dir, last_step)
        return [*(line for line in evaluations if line["step"] == 0), *metrics]

    def say(self, line: str) -> None:
        """Append a readable line to `progress.log`."""
        with writing(self.run_dir), (self.run_dir / PROGRESS).open("a", encoding="utf-8") as file:
            file.write(f"{line}\n")

    def follow(self, follower: Callable[[Mapping[str, float]], None]) -> None:
        """Call `follower` with each line of metrics, including the evaluation before training.

        The run waits for the call, so `follower` must return quickly.
        """
        self._followers.append(follower)

    def watch(self, watcher: Callable[[TaskRunSpan], None]) -> None:
        """Call `watcher` with each recorded task run, one call at a time. The run waits for it."""
        self._watchers.append(watcher)

    def last_steps(self, number: int, *, with_switches: bool = False) -> tuple[TaskRunSpan, ...]:
        """Return the newest steps' task runs; `number` is at most `STEPS_KEPT`.

        With `with_switches`, switches between plans before these steps are included.
        """
        with self._lock:
            steps = sorted(self._by_step)[-number:]
            spans = (span for step in steps for span in self._by_step[step])
            return tuple(span for span in spans if with_switches or span.kind != SWITCH)

    def record(self, span: TaskRunSpan) -> None:
        """Record a finished task run, with its predicted next to its measured seconds."""
        span = replace(span, predicted_seconds=self._predicted_seconds(span.node))
        with self._lock:
            is_late = bool(self._finished) and span.step < self._finished[0]
            if not is_late:  # a commit may end after its step was dropped
                self._by_step[span.step].append(span)
            values = {field.name: getattr(span, field.name) for field in fields(span)}  # asdict would copy all of them
            _append(self.run_dir / TASK_RUNS, values)
            for watcher in self._watchers:
                watcher(span)

    def finish_step(self, step: int) -> Mapping[str, float]:
        """Write and return a step's metrics: each call's, as `call.metric`, and the shares of its time.

        Metrics of evaluation calls also become a line of `evaluation.jsonl`, the only line for step 0, the evaluation
        before training.
        """
        with self._lock:
            line, metrics = self._lines_of(step, self._by_step[step])
            if line:
                _append(self.run_dir / EVALUATIONS, line)
            if step > 0:
                line = metrics
                _append(self.run_dir / "metrics.jsonl", line)
            self._finished.append(step)
            if len(self._finished) > STEPS_KEPT:
                del self._by_step[self._finished.popleft()]
        for follower in self._followers if line else ():
            follower(line)
        return metrics

    def _lines_of(self, step: int, spans: Iterable[TaskRunSpan]) -> tuple[dict[str, float], dict[str, float]]:
        """Return the evaluation of a step, empty without any, and all metrics of the step."""
        spans = sorted(spans, key=lambda span: self._position.get(span.call or "", -1))
        evaluated = call_metrics(span for span in spans if span.call in self._evaluations)
        return {"step": step, **evaluated} if evaluated else {}, {"step": step, **step_metrics(spans)}

    def _lost(self, steps: range, earlier: Path) -> Iterator[tuple[dict[str, float], dict[str, float]]]:
        """Yield evaluation and metrics of steps whose task runs an earlier run has recorded."""
        lines = _of_steps_until(steps.stop - 1, earlier / TASK_RUNS) if steps else []
        spans = [_span_of(line) for line in lines if line["step"] in steps]
        for step in steps:
            if of_step := [span for span in spans if span.step == step]:
                yield self._lines_of(step, of_step)


def _of_steps_until(last_step: int, path: Path) -> list[Mapping[str, Any]]:
    """Read the lines of steps up to `last_step`, without a last line that a kill left incomplete."""
    values = list(finished_lines("resume_from", path))
    if not all(isinstance(value.get("step"), int) for value in values):
        raise InvalidInput("resume_from", str(path), "JSON lines as written by a run, each with its step")
    return [value for value in values if value["step"] <= last_step]


def _end(lines: Iterable[Mapping[str, Any]]) -> int:
    """Return the step after those of lines."""
    return max((line["step"] + 1 for line in lines), default=0)


def _lines(rows: Iterable[Mapping[str, object]]) -> str:
    return "".join(json.dumps(values) + "\n" for values in rows)


def read_spans(run_dir: Path) -> tuple[TaskRunSpan, ...]:
    """Read the task runs that `record` wrote into a run's folder."""
    lines = (run_dir / TASK_RUNS).read_text(encoding="utf-8").splitlines()
    return tuple(_span_of(json.loads(line)) for line in lines)


def _span_of(value: Mapping[str, Any]) -> TaskRunSpan:
    """Read a task run from a line of the record."""
    return TaskRunSpan(**{**value, **{name: tuple(value.get(name, ())) for name in ("devices", "depends_on")}})


def step_metrics(spans: Sequence[TaskRunSpan]) -> dict[str, float]:
    """Return all metrics of a step's task runs, the step time, and the shares of time outside model calls.

    Nodes that run during later steps are left out.
    """
    spans = [span for span in spans if span.kind not in BEHIND]
    return call_metrics(spans) | time_shares(spans)


def call_metrics(spans: Iterable[TaskRunSpan]) -> dict[str, float]:
    """Return task runs' metrics as `call.metric`; for a call in parts, the mean weighted by rows or tokens."""
    by_call: dict[str, list[TaskRunSpan]] = defaultdict(list)
    for span in spans:
        if span.metrics:
            by_call[span.call or ""].append(span)
    return {f"{call}.{name}": value for call, parts in by_call.items() for name, value in mean_metrics(parts).items()}


def time_shares(spans: Sequence[TaskRunSpan]) -> dict[str, float]:
    """Return the wall time that `spans` cover in seconds, and the share of it in which no rank runs a model call.

    `orchestration_share` includes injected nodes and computations. `fingerprint_share` is the share spent on weight
    fingerprints, in all nodes.

    >>> memory = {"device_bytes": {}, "resident_bytes": {}, "store_bytes": {}}
    >>> call = TaskRunSpan("a", "", "generate", "a", 0, "", "", (), start=0.0, end=10.0, seconds=9.0, **memory)
    >>> time_shares([call])["orchestration_share"]
    0.1
    """
    if not spans:
        return {}
    wall = max(span.end for span in spans) - min(span.start for span in spans)
    calls = [span for span in spans if span.kind in MODEL_FUNCTION_CALLS]
    busy = covered_seconds((span.end - span.seconds, span.end) for span in calls)
    return {
        "seconds": wall,
        "orchestration_share": round(1 - busy / wall, 9) if wall else 0.0,
        "fingerprint_share": sum(span.fingerprint_seconds for span in spans) / wall if wall else 0.0,
    }


def covered_seconds(intervals: Iterable[tuple[float, float]]) -> float:
    """Return the total length covered by intervals that may overlap.

    >>> covered_seconds([(0.0, 2.0), (1.0, 3.0), (5.0, 6.0)])
    4.0
    """
    total, reached = 0.0, float("-inf")
    for start, end in sorted(intervals):
        total += max(0.0, end - max(start, reached))
        reached = max(reached, end)
    return total


def _append(path: Path, values: Mapping[str, object]) -> None:
    with writing(path), path.open("a", encoding="utf-8") as file:
        file.write(_lines([values]))
