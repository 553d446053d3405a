"""A process of a benchmark: it has a limit, and it ends with this process."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from benchmarks.one_card.guard import kill_tree
from benchmarks.one_card.record import Record

ROOT = Path(__file__).resolve().parents[2]
FINDING = '{"finding":'  # how the line of a finding begins
NO_MEMORY = 75  # the status of a child that found too little memory


def say(finding: str, **values: Any) -> None:
    """Print a finding of a child, which `relayed` records."""
    print(json.dumps({"finding": finding, **values}), flush=True)


@contextmanager
def started(
    command: Sequence[str], log: Path, variables: Mapping[str, str], **options: Any
) -> Iterator[subprocess.Popen[str]]:
    """Start a process in a session of its own; it ends with the body, and if this process is killed."""
    before = os.environ.get("PYTHONPATH")
    path = os.pathsep.join(part for part in (variables.get("PYTHONPATH"), str(ROOT), before) if part)
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "PYTHONUNBUFFERED": "1", **variables, "PYTHONPATH": path}
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("a", encoding="utf-8") as errors:
        process = subprocess.Popen(
            command,
            env=environment,
            stderr=errors,
            text=True,
            start_new_session=True,
            **({"stdout": errors} | options),
        )
        with guarded(process):
            yield process


@contextmanager
def guarded(process: subprocess.Popen[str]) -> Iterator[None]:
    """End a process after the body; a guard ends it if this process is killed, which closes the pipe that it reads."""
    command = [sys.executable, str(Path(__file__).with_name("guard.py")), str(process.pid)]
    guard = subprocess.Popen(command, stdin=subprocess.PIPE, start_new_session=True)
    try:
        yield
    finally:
        guard.kill()  # first: the number of the session may be another's later
        guard.wait()
        end(process)


def end(process: subprocess.Popen[str]) -> None:
    """Kill a process and all below it: a run that is asked to end would first write a checkpoint of gigabytes."""
    if process.poll() is None:
        kill_tree(process.pid)
    process.wait()


def relayed(
    module: str,
    argument: str,
    record: Record,
    log: Path,
    limit_seconds: float,
    variables: Mapping[str, str] | None = None,
    seen: Callable[[Mapping[str, Any]], None] = lambda finding: None,
) -> int:
    """Run `python -m module argument` and record each line of JSON that it prints; return its status."""
    began = time.monotonic()
    command = [sys.executable, "-m", module, argument]
    with started(command, log, variables or {}, stdout=subprocess.PIPE) as process:
        timer = threading.Timer(limit_seconds, end, [process])
        timer.daemon = True
        timer.start()
        assert process.stdout is not None
        for line in process.stdout:
            if line.startswith(FINDING):
                finding = json.loads(line)
                record.add(**finding)
                seen(finding)
            else:  # what a library prints
                with log.open("a", encoding="utf-8") as others:
                    others.write(line)
        status = process.wait()
        timer.cancel()
    if status:
        is_late = time.monotonic() - began >= limit_seconds
        why = f"no end within {limit_seconds:.0f} s" if is_late else last_line(log)
        record.add("failed", module=module, status=status, why=why, log=str(log))
    return status


def last_line(log: Path) -> str:
    """Return the last line of a log that says something."""
    lines = [line.strip() for line in log.read_text(encoding="utf-8", errors="replace").splitlines() if line.strip()]
    return lines[-1][:400] if lines else ""
