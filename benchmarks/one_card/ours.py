"""Our half of `one_gpu.py`: GRPO by the command line, watched from outside through the files that the run writes."""

from __future__ import annotations

import json
import shutil
import sys
import time
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from statistics import fmean, median
from typing import Any

from benchmarks.one_card.child import last_line, relayed, started
from benchmarks.one_card.memory import memory_finding, rounded
from benchmarks.one_card.parts import log_of, parts_of
from benchmarks.one_card.rates import FORMULA, utilisation
from benchmarks.one_card.record import Record
from benchmarks.one_card.work import Work
from prefect_rlhf.tasks.running.journal import TaskRunSpan, read_spans

POLL_SECONDS = 0.5
PLAN_SECONDS = 90.0
PARAMETERS = "parameters.yaml"


def measure(work: Work, record: Record, folder: Path, parameters: int, limit_seconds: float) -> bool:
    """Choose the plan, run, and record what the run writes as it comes; return whether the run reached its end."""
    folder.mkdir(parents=True, exist_ok=True)
    log = folder / "plan.log"
    if relayed("benchmarks.one_card.fitting", json.dumps([work.text, str(folder)]), record, log, PLAN_SECONDS):
        return False
    began, log = time.time(), folder / "run.log"
    command = [
        str(program()),
        "run",
        "grpo",
        "--parameters",
        str(folder / PARAMETERS),
        "--devices",
        "1",
        "--kind",
        work.kind,
    ]
    variables = {"PREFECT_HOME": str(folder / "prefect"), "VLLM_LOGGING_LEVEL": "INFO"}
    watcher = Watcher(work, record, folder / "runs", parameters, began)
    with started(command, log, variables) as process:
        try:
            while process.poll() is None and time.time() - began < limit_seconds:
                time.sleep(POLL_SECONDS)
                watcher.look()
        finally:  # also if this process is asked to end
            watcher.look()
            watcher.end()
        status = process.poll()
    is_late = status is None
    if is_late or status:
        why = f"no end within {limit_seconds:.0f} s" if is_late else last_line(log)
        record.add("failed", status=status, why=why, log=str(log))
    return not (is_late or status)


def program() -> Path:
    """Return the console script of this Python."""
    beside = Path(sys.executable).with_name("prefect-rlhf")
    found = beside if beside.exists() else shutil.which("prefect-rlhf")
    if found is None:
        sys.exit(f"prefect-rlhf: not beside {sys.executable} and not on PATH")
    return Path(found)


class Watcher:
    """Records the steps of a run from the files of its folder, each as soon as the run has written it."""

    def __init__(self, work: Work, record: Record, runs: Path, parameters: int, began: float) -> None:
        self._work, self._record, self._runs, self._parameters = work, record, runs, parameters
        self._began, self._steps = began, 0
        self._has_begun = self._has_memory = False

    def look(self) -> None:
        """Record what is new."""
        folder = run_folder(self._runs)
        if folder is None:
            return
        if not self._has_begun:
            self._has_begun = True
            self._record.add("run begun", folder=str(folder), seconds=round(time.time() - self._began, 1))
        spans = spans_of(self._runs)
        if not spans:
            return
        done = len(lines_of(folder / "metrics.jsonl"))
        for step in range(self._steps + 1, done + 1):
            self._steps = step
            self._record.add("step", step=step, **step_finding(spans, step))
            if step == 1:
                self._record.add("first step", **parts_of(log_of(self._runs), spans, self._began))
        memory = folder / "memory.json"
        if memory.is_file() and self._steps and not self._has_memory:
            self._has_memory = True
            self._memory(folder)

    def end(self) -> None:
        """Record the medians of the steps after the first, memory and utilisation."""
        folder = run_folder(self._runs)
        if folder is None or not (spans := spans_of(self._runs)):
            return
        self._memory(folder)
        calls = call_seconds(spans)
        seconds = step_seconds(spans)
        if not calls or not seconds:
            return
        self._record.add("calls", seconds=calls, steps=len(seconds))
        step = median(seconds)
        each = [rounded(value) for value in seconds]
        self._record.add("step seconds", seconds=rounded(step), mean=rounded(fmean(seconds)), each=each)
        trained = calls.get("actor_train", {}).get("measured")
        if trained:
            found = utilisation(self._work, self._parameters, step, trained)
            self._record.add("utilisation", parameters=self._parameters, formula=FORMULA, **found)

    def _memory(self, folder: Path) -> None:
        file, proof = folder / "memory.json", folder / "certificate.json"
        if file.is_file() and proof.is_file():
            measured = json.loads(file.read_text())["devices"]
            self._record.add("memory", **memory_finding(measured, json.loads(proof.read_text())))


def run_folder(runs: Path) -> Path | None:
    """Return the folder of the run in a folder of runs; None before the run has made it."""
    return next((file.parent for file in runs.glob("*/run.json") if not file.parent.is_symlink()), None)


def spans_of(runs: Path) -> Sequence[TaskRunSpan]:
    """Return the task runs so far of the run in a folder of runs."""
    folder = run_folder(runs)
    try:
        return read_spans(folder) if folder else ()
    except (OSError, ValueError):  # no line yet, or the last is being written
        return ()


def lines_of(file: Path) -> list[str]:
    """Return the whole lines of a file that a run appends to."""
    text = file.read_text() if file.is_file() else ""
    return text[: text.rfind("\n") + 1].splitlines()


def step_finding(spans: Sequence[TaskRunSpan], step: int) -> dict[str, Any]:
    """Return the wall seconds of a step and the working seconds of each of its nodes."""
    mine = [span for span in spans if span.step == step]
    trained = [span for span in mine if span.kind == "train_step"]
    if not trained:
        return {}
    begin, finish = min(span.start for span in mine), max(span.end for span in trained)
    return {
        "seconds": rounded(finish - begin),
        "working": {subject(span): rounded(span.seconds) for span in sorted(mine, key=lambda span: span.start)},
    }


def step_seconds(spans: Sequence[TaskRunSpan]) -> list[float]:
    """Seconds from the end of an optimizer step to the end of the next: all of a step, also what comes between."""
    ends = [span.end for span in sorted(spans, key=lambda span: span.step) if span.kind == "train_step"]
    return [after - before for before, after in pairwise(ends)]


def subject(span: TaskRunSpan) -> str:
    """Return what a node does, without its step."""
    return span.node.partition("@")[0]


def call_seconds(spans: Sequence[TaskRunSpan]) -> dict[str, dict[str, float | None]]:
    """Return measured and predicted seconds of each node: the median of the steps after the first."""
    by_subject: dict[str, list[TaskRunSpan]] = {}
    for span in spans:
        if span.step > 1:
            by_subject.setdefault(subject(span), []).append(span)
    return {
        name: {
            "measured": rounded(median(span.seconds for span in mine)),
            "with_orchestration": rounded(median(span.end - span.start for span in mine)),
            "predicted": rounded(mine[0].predicted_seconds),
        }
        for name, mine in by_subject.items()
    }
