"""Prices a run's plan again in another process while the run trains.

If it yields, it gets only processor time that no other program wants, so two busy cores can starve it for minutes.
`RecheckProcess` starts it. It reads a request from standard input and writes its answer to standard output. It ends
with the run: an otherwise unused pipe then closes.
"""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryFile

from prefect_rlhf.errors.errors import RlhfError
from prefect_rlhf.files.processes.environment import shown, take, written
from prefect_rlhf.files.processes.lifeline import exit_with
from prefect_rlhf.flows.training.lengths import distribution
from prefect_rlhf.placement.cost.workload import Workload
from prefect_rlhf.placement.engine_traits import EngineTraits, register
from prefect_rlhf.placement.models.outputs import Output
from prefect_rlhf.placement.models.outputs import register as register_output
from prefect_rlhf.placement.plan import ExecutionPlan
from prefect_rlhf.placement.planner.fitted_constants import Measured
from prefect_rlhf.placement.planner.question import Question
from prefect_rlhf.placement.planner.recheck import Recheck, recheck
from prefect_rlhf.tasks.data.stored.stored_rows import StoredRows

_YIELD = """
import os
from contextlib import suppress
os.nice(19)
with suppress(OSError, AttributeError):
    os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
with suppress(OSError), open("/proc/self/autogroup", "w") as file:
    file.write("19")
"""
"""Makes the process yield to all other programs before its first import. A container may forbid the policy, which only
Linux has. Linux may share cores equally among sessions (autogroups), so the session needs a priority of its own."""
_TAKE = f"import sys\nfrom {take.__module__} import take\ntake(int(sys.argv[2]))\n"
_PROGRAM = f"{_TAKE}from {__name__} import main\nmain()"
_COMMAND = (sys.executable, "-P", "-c")
_ENVIRONMENT = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}


@dataclass(frozen=True, slots=True)
class RecheckRequest:
    """The arguments of `recheck`, all engines and outputs, and files of rollouts with the measured responses."""

    question: Question
    plan: ExecutionPlan
    measured: Mapping[str, Measured]
    was_searched: bool
    evaluations: int
    traits: Mapping[str, EngineTraits]
    outputs: Mapping[str, Output]
    rollouts: tuple[Path, ...]
    least_gain: float

    def answer(self) -> Recheck | None:
        """Price the plan for responses as long as the recorded responses."""
        workload = _as_recorded(self.question.workload, self.rollouts)
        was_searched = self.was_searched and workload == self.question.workload
        question = replace(self.question, workload=workload)
        asked = question, self.plan, self.measured, self.evaluations
        return recheck(*asked, was_searched=was_searched, least_gain=self.least_gain)


class RecheckProcess:
    """A running recheck; if it `yields`, all other programs go first. Raises OSError if it cannot start."""

    def __init__(self, request: RecheckRequest, yields: bool = True) -> None:
        self._output = TemporaryFile()  # noqa: SIM115  closed by `close`
        self._errors = TemporaryFile()  # noqa: SIM115  closed by `close`
        lifeline, self._life = os.pipe()
        variables = os.environ | _ENVIRONMENT
        with TemporaryFile() as file, written(variables) as hidden:
            pickle.dump(request, file)  # not through a pipe: the run would wait until the process reads it
            file.seek(0)
            self._process = subprocess.Popen(
                (*_COMMAND, (_YIELD if yields else "") + _PROGRAM, str(lifeline), str(hidden)),
                stdin=file,
                stdout=self._output,
                stderr=self._errors,
                pass_fds=(lifeline, hidden),
                env=shown(variables),
                start_new_session=True,  # Ctrl-C at a terminal is for the run
            )
        os.close(lifeline)

    @property
    def ended(self) -> bool:
        """Whether the process has answered or failed."""
        return self._process.poll() is not None

    def answer(self) -> Recheck | None:
        """Return the answer of an ended process. Raises RlhfError if it failed."""
        self._output.seek(0)
        self._errors.seek(0)
        if self._process.returncode:
            lines = self._errors.read().decode(errors="replace").split("\n")
            raise RlhfError(next((line for line in reversed(lines) if line), f"exit {self._process.returncode}"))
        found: Recheck | RlhfError | None = pickle.load(self._output)
        if isinstance(found, RlhfError):
            raise found
        return found

    def close(self) -> None:
        """End the process."""
        self._process.kill()
        self._process.wait()
        os.close(self._life)
        self._output.close()
        self._errors.close()


def main() -> None:
    """Answer the request on standard input. Arguments: the run's pipe, and its environment variables."""
    exit_with(int(sys.argv[1]))
    request: RecheckRequest = pickle.load(sys.stdin.buffer)
    for name, traits in request.traits.items():
        register(name, traits)
    for key, output in request.outputs.items():
        register_output(key, output)
    try:
        answer: Recheck | RlhfError | None = request.answer()
    except RlhfError as error:
        answer = error
    pickle.dump(answer, sys.stdout.buffer)


def _as_recorded(workload: Workload, files: tuple[Path, ...]) -> Workload:
    """Return the workload with the recorded lengths of responses. The longest possible row still counts for memory."""
    if workload.made or not files:
        return workload
    lengths = [len(logprobs) for file in files for logprobs in StoredRows("rollouts", str(file)).read("logprobs")]
    return replace(workload, responses=distribution(lengths).reaching(workload.responses.longest))
