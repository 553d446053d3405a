"""The run's own record, on disk as it goes: one JSON line per task run and one per step.

Prefect's database is for looking; this is what a benchmark, a timeline or a later run reads.
"""

from __future__ import annotations

import json
import threading
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

MODEL_FUNCTION_CALLS = frozenset({"generate", "inference", "train_step"})


@dataclass(frozen=True, slots=True)
class TaskRunSpan:
    """One task run as it happened. `start` and `end` are Unix seconds of the controller's clock.

    `seconds` is the longest time a rank worked on it, by the rank's own clock; what is beyond is orchestration.
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
    end: float
    seconds: float
    reads: int | None = None  # the weight version that it used, as the ranks checked
    writes: int | None = None
    fingerprint_seconds: float = 0.0
    bytes_moved: int = 0
    num_tokens: int = 0
    peak_extra_bytes: int = 0  # the most that a rank staged for what it moved
    device_bytes: Mapping[str, int] = field(default_factory=dict)  # rank -> bytes when it ended
    resident_bytes: Mapping[str, int] = field(default_factory=dict)  # rank -> memory of its process
    store_bytes: Mapping[str, int] = field(default_factory=dict)  # rank -> rows that it still held
    metrics: Mapping[str, float] = field(default_factory=dict)
    predicted_seconds: float | None = None  # where the plan came with an estimate


class Journal:
    """Appends to `task_runs.jsonl` and `metrics.jsonl` in `run_dir`; safe to call from many threads."""

    def __init__(self, run_dir: Path, predicted_seconds: Callable[[str], float | None] = lambda node: None) -> None:
        run_dir.mkdir(parents=True, exist_ok=True)
        self.run_dir = run_dir
        self._predicted_seconds = predicted_seconds  # of a node, by its id
        self._by_step: dict[int, list[TaskRunSpan]] = defaultdict(list)
        self._lock = threading.Lock()

    def keep(self, name: str, text: str) -> None:
        """Write a file of the run's folder: beside, then renamed, so that a reader never sees half of it."""
        beside = self.run_dir / f"{name}.part"
        beside.write_text(text, encoding="utf-8")
        beside.replace(self.run_dir / name)

    def carry_over(self, earlier: Path, before: int) -> list[Mapping[str, float]]:
        """Begin `metrics.jsonl` with the steps under `before` of an earlier run's, if that is still there."""
        path = earlier / "metrics.jsonl"
        lines = path.read_text(encoding="utf-8").splitlines() if path.is_file() else []
        steps: list[Mapping[str, float]] = [values for line in lines if (values := json.loads(line))["step"] < before]
        for values in steps:
            _append(self.run_dir / "metrics.jsonl", values)
        return steps

    def last_steps(self, number: int) -> tuple[TaskRunSpan, ...]:
        """The task runs of the newest steps so far."""
        with self._lock:
            steps = sorted(self._by_step)[-number:]
            return tuple(span for step in steps for span in self._by_step[step])

    def record(self, span: TaskRunSpan) -> None:
        """Keep a finished task run, with its predicted seconds beside the measured ones."""
        span = replace(span, predicted_seconds=self._predicted_seconds(span.node))
        with self._lock:
            self._by_step[span.step].append(span)
            _append(self.run_dir / "task_runs.jsonl", asdict(span))

    def finish_step(self, step: int) -> Mapping[str, float]:
        """Write and return the metrics of a step: each call's, under `call.metric`, and where its time went."""
        with self._lock:
            metrics = {"step": float(step), **step_metrics(self._by_step[step])}
            _append(self.run_dir / "metrics.jsonl", metrics)
        return metrics


def read_spans(run_dir: Path) -> tuple[TaskRunSpan, ...]:
    """What `record` wrote into a run's folder."""
    lines = (run_dir / "task_runs.jsonl").read_text(encoding="utf-8").splitlines()
    values = (json.loads(line) for line in lines)
    return tuple(TaskRunSpan(**{**value, "devices": tuple(value["devices"])}) for value in values)


def step_metrics(spans: Sequence[TaskRunSpan]) -> dict[str, float]:
    """All metrics of one step's task runs, with `seconds` and the shares of it outside of model function calls."""
    metrics = {f"{span.call}.{name}": value for span in spans for name, value in span.metrics.items()}
    return metrics | time_shares(spans)


def time_shares(spans: Sequence[TaskRunSpan]) -> dict[str, float]:
    """Wall seconds that `spans` cover, and which share of them no rank spent in a model function call.

    `orchestration_share` is everything else, injected nodes and computations included; `fingerprint_share` is the time
    spent on weight fingerprints, wherever it was.

    >>> call = TaskRunSpan("a", "", "generate", "a", 0, "", "", (), start=0.0, end=10.0, seconds=9.0)
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
    """Length of the union of intervals.

    >>> covered_seconds([(0.0, 2.0), (1.0, 3.0), (5.0, 6.0)])
    4.0
    """
    total, reached = 0.0, float("-inf")
    for start, end in sorted(intervals):
        total += max(0.0, end - max(start, reached))
        reached = max(reached, end)
    return total


def _append(path: Path, values: Mapping[str, object]) -> None:
    with path.open("a", encoding="utf-8") as file:
        file.write(json.dumps(values) + "\n")
