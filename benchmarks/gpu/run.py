"""A step in a process of its own, with a limit; the next step runs whatever becomes of it."""

from __future__ import annotations

import importlib.util
import json
import multiprocessing
import os
import signal
import sys
import time
import traceback
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal

from benchmarks.gpu.findings import Findings, kept
from benchmarks.gpu.step import Machine, Step

Status = Literal["done", "failed", "too slow", "needs a GPU", "needs vllm", "needs several GPUs"]
LACKING: dict[Status, str] = {
    "needs a GPU": "the pretend GPU cannot run it",
    "needs vllm": "vllm is not installed",
    "needs several GPUs": "this machine has one",
}


@dataclass(frozen=True)
class Outcome:
    """The end of a step: the findings until then, and the last line of its error."""

    step: str
    status: Status
    seconds: float = 0.0
    found: Mapping[str, Any] | None = None
    differs: tuple[str, ...] = ()  # findings out of their range
    reason: str = ""

    def line(self) -> str:
        return json.dumps(asdict(self))


def run_step(step: Step, machine: Machine) -> Outcome:
    """Run a step unless the machine lacks something that it needs."""
    if (lacks := _lacks(step, machine)) is not None:
        return Outcome(step.name, lacks, reason=LACKING[lacks])
    folder = machine.folder / step.name
    folder.mkdir(parents=True, exist_ok=True)
    for name in ("findings.jsonl", "answer.json"):  # of an earlier run
        (folder / name).unlink(missing_ok=True)
    # A process that has used CUDA cannot fork. The pretend GPU has no such limit, and a fork has imported everything.
    context = multiprocessing.get_context("fork" if machine.pretend else "spawn")
    process = context.Process(target=_in_process, args=(step, replace(machine, folder=folder)))
    began = time.monotonic()
    process.start()
    try:
        process.join(step.limit_seconds)
    finally:
        ended = not process.is_alive()
        with suppress(ProcessLookupError):  # it may have ended meanwhile
            if not ended:
                os.killpg(process.pid, signal.SIGKILL)  # with all that it started
        process.join()
    seconds, found = round(time.monotonic() - began, 1), kept(folder / "findings.jsonl")
    differs = tuple(key for key, range_ in step.expects.items() if key in found and not range_.holds(found[key]))
    if not ended:
        return Outcome(step.name, "too slow", seconds, found, differs, f"no end within {step.limit_seconds} s")
    answer = folder / "answer.json"
    if not answer.is_file():
        reason = f"it ended with {process.exitcode}; see {folder}/log.txt"
        return Outcome(step.name, "failed", seconds, found, differs, reason)
    if error := json.loads(answer.read_text())["error"]:
        return Outcome(step.name, "failed", seconds, found, differs, error)
    return Outcome(step.name, "done", seconds, found, differs)


def _lacks(step: Step, machine: Machine) -> Status | None:
    if "hardware" in step.needs and machine.pretend:
        return "needs a GPU"
    if "several" in step.needs and machine.num_gpus < 2:
        return "needs several GPUs"
    if "vllm" in step.needs and importlib.util.find_spec("vllm") is None:
        return "needs vllm"
    return None


def _in_process(step: Step, machine: Machine) -> None:
    """Run a step as the leader of its own group of processes; write its findings as they come, and its error."""
    os.setsid()
    terminal = os.fdopen(os.dup(1), "w")
    log = (machine.folder / "log.txt").open("w")
    for standard in (1, 2):  # of this process, and of all that it starts
        os.dup2(log.fileno(), standard)
    sys.stdout = sys.stderr = log
    error = ""
    found = Findings(machine.folder / "findings.jsonl", {"step": step.name, **machine.card}, terminal)
    try:
        returned = step.run(replace(machine, found=found))
        found.update({name: value for name, value in returned.items() if name not in found})
    except BaseException as raised:  # noqa: BLE001  any error is the step's result
        traceback.print_exc()
        error = f"{type(raised).__name__}: {raised}".splitlines()[0][:300]
    (machine.folder / "answer.json").write_text(json.dumps({"error": error}))
