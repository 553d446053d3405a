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
from dataclasses import asdict, dataclass
from typing import Any, Literal

from benchmarks.gpu.step import Machine, Step

Status = Literal["done", "failed", "too slow", "needs a GPU", "needs vllm", "needs several GPUs"]


@dataclass(frozen=True)
class Outcome:
    """The end of a step: its findings, or the last line of its error."""

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
    if "hardware" in step.needs and machine.pretend:
        return Outcome(step.name, "needs a GPU")
    if "several" in step.needs and machine.num_gpus < 2:
        return Outcome(step.name, "needs several GPUs")
    if "vllm" in step.needs and importlib.util.find_spec("vllm") is None:
        return Outcome(step.name, "needs vllm")
    folder = machine.folder / step.name
    folder.mkdir(parents=True, exist_ok=True)
    # A process that has used CUDA cannot fork. The pretend GPU has no such limit, and a fork has imported everything.
    context = multiprocessing.get_context("fork" if machine.pretend else "spawn")
    process = context.Process(target=_in_process, args=(step, Machine(folder, machine.pretend, machine.num_gpus)))
    began = time.monotonic()
    process.start()
    process.join(step.limit_seconds)
    seconds = round(time.monotonic() - began, 1)
    if process.is_alive():
        with suppress(ProcessLookupError):  # it may have ended meanwhile
            os.killpg(process.pid, signal.SIGKILL)  # with all that it started
        process.join()
        return Outcome(step.name, "too slow", seconds, reason=f"no end within {step.limit_seconds} s")
    answer = folder / "answer.json"
    if not answer.is_file():
        return Outcome(step.name, "failed", seconds, reason=f"it ended with {process.exitcode}; see {folder}/log.txt")
    said = json.loads(answer.read_text())
    if "error" in said:
        return Outcome(step.name, "failed", seconds, reason=said["error"])
    found = said["found"]
    differs = tuple(key for key, range_ in step.expects.items() if key in found and not range_.holds(found[key]))
    return Outcome(step.name, "done", seconds, found, differs)


def _in_process(step: Step, machine: Machine) -> None:
    """Run a step as the leader of its own group of processes; write its findings, or its error, as JSON."""
    os.setsid()
    log = (machine.folder / "log.txt").open("w")
    for standard in (1, 2):  # of this process, and of all that it starts
        os.dup2(log.fileno(), standard)
    sys.stdout = sys.stderr = log
    try:
        said: dict[str, Any] = {"found": dict(step.run(machine))}
    except BaseException as error:  # noqa: BLE001  any error is the step's result
        traceback.print_exc()
        said = {"error": f"{type(error).__name__}: {error}".splitlines()[0][:300]}
    (machine.folder / "answer.json").write_text(json.dumps(said, default=str))
