"""The time to a run's first step, part by part, read from its log and its record."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

from prefect_rlhf.tasks.running.journal import TaskRunSpan

_LINE = re.compile(r"^(\d\d:\d\d:\d\d\.\d{3}) \| \w+ +\| (.*)$")
_BUILT = re.compile(r"built (\S+) .*in ([\d.]+) s")
_INSIDE = {  # lines of vLLM at level INFO
    "compile": re.compile(r"torch\.compile took ([\d.]+) s"),
    "graphs": re.compile(r"Graph capturing finished in ([\d.]+) secs"),
    "profile, cache and warm-up": re.compile(r"init engine .*took ([\d.]+) s"),
}
_MARKS = {
    "imports and checks": "Starting temporary server",
    "server": "Beginning flow run",
    "preparation": "files of this run",
}


def parts_of(log: str, spans: Sequence[TaskRunSpan], began: float) -> dict[str, Any]:
    """Return the seconds of each part in order, of what lies inside of a part, and of all until the first step's end.

    `began` is when the command was given, in Unix seconds; `log` is the run's own log, with times of this machine.
    `ranks` is the start of the ranks and what a build does not count. Parts that the log does not show are left out.
    """
    lines, found, reached = list(_lines(log, began)), dict[str, float](), began
    for part, mark in _MARKS.items():
        at = next((time for time, text in lines if mark in text), None)
        if at is not None:
            found[part], reached = at - reached, at
    for at, built in ((time, match) for time, text in lines if (match := _BUILT.search(text))):
        seconds = float(built[2])
        found["ranks"] = found.get("ranks", 0.0) + max(0.0, at - seconds - reached)
        found[f"build {built[1]}"], reached = seconds, at
    first = [span for span in spans if span.step == 1 and span.kind in ("generate", "train_step")]
    if len(first) >= 2:
        generate = min((span for span in first if span.kind == "generate"), key=lambda span: span.start)
        train = min((span for span in first if span.kind == "train_step"), key=lambda span: span.start)
        before = [span for span in spans if span.step == 0 and span.kind == "generate"]
        found["begin of steps"] = min(span.start for span in spans) - reached
        found |= {"evaluation before training": before[0].end - before[0].start} if before else {}
        found["first generate"] = generate.end - generate.start
        found["rewards and advantages"] = train.start - generate.end
        found["first train_step"] = train.end - train.start
        found["all"] = train.end - began
    inside = {name: [float(value) for value in each.findall(log)] for name, each in _INSIDE.items()}
    shown = {name: values for name, values in inside.items() if values}
    return {"parts": {name: round(value, 2) for name, value in found.items()}, "inside the build of vllm": shown}


def log_of(runs: Path) -> str:
    """Return the newest log in a folder of runs; empty if there is none yet."""
    logs = sorted((runs / "logs").glob("*.log"), key=lambda file: file.stat().st_mtime)
    return logs[-1].read_text(encoding="utf-8", errors="replace") if logs else ""


def _lines(log: str, began: float) -> Iterator[tuple[float, str]]:
    """Yield the Unix seconds and the text of each line with a time; a time before `began` is of the next day."""
    start = datetime.fromtimestamp(began)  # noqa: DTZ006  a log has the machine's own time
    for match in filter(None, map(_LINE.match, log.splitlines())):
        clock = datetime.strptime(match[1], "%H:%M:%S.%f").time()  # noqa: DTZ007
        at = datetime.combine(start.date(), clock)
        yield (at + timedelta(days=at < start - timedelta(seconds=2))).timestamp(), match[2]
