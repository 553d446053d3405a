"""The process that starts and reaps ranks: `python -m prefect_rlhf.engines.gang.processes.fork_server SETTINGS`.

The standard library's forkserver would import the controller's main module (Prefect) into every rank, and it fixes the
environment of all gangs at the first start. This fork server does neither. A rank inherits only its own pipes and the
lifeline from the controller's file descriptors; rank 0 also inherits the listener.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import sys
from contextlib import suppress
from dataclasses import asdict, dataclass
from itertools import chain
from types import FrameType
from typing import TYPE_CHECKING

from prefect_rlhf.files.processes.environment import handed_over
from prefect_rlhf.files.processes.lifeline import exiting_with

if TYPE_CHECKING:
    from prefect_rlhf.engines.gang.processes.messages import StartMethod


@dataclass(frozen=True, slots=True)
class ForkServerSettings:
    """The descriptors that the fork server inherits, its folder, and the modules that forked ranks find imported."""

    method: StartMethod
    lifeline: int
    deaths: int
    listener: int | None
    """The socket of the world's store, on the node of rank 0 only."""
    pipes: tuple[tuple[int, ...], ...]
    """Those of each rank, one per resource of its device."""
    preload: tuple[str, ...]
    folder: str
    """The fork server removes it after the end of the last rank."""
    held: int
    """The lock on `folder`."""

    def command(self) -> list[str]:
        return [sys.executable, "-P", "-m", __spec__.name, json.dumps(asdict(self))]

    @property
    def descriptors(self) -> tuple[int, ...]:
        listener = () if self.listener is None else (self.listener,)
        return (self.lifeline, self.deaths, self.held, *listener, *chain.from_iterable(self.pipes))


def main(settings: ForkServerSettings) -> None:
    """Start every rank, then report the death of each as a line `{"rank": r, "status": s}` until all are dead."""
    if settings.method == "fork":
        with exiting_with(settings.lifeline):
            from prefect_rlhf.engines.gang.processes.preload import preload

            preload(settings.preload)
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})  # until `ranks` is complete
    ranks = {_start(settings, rank): rank for rank in range(len(settings.pipes))}
    _kill_all_on_terminate(ranks)
    for descriptor in set(settings.descriptors) - {settings.deaths, settings.held}:
        os.close(descriptor)
    while ranks:
        pid, status = os.wait()
        report = json.dumps({"rank": ranks.pop(pid), "status": status}).encode() + b"\n"
        with suppress(BrokenPipeError):  # the controller is gone
            os.write(settings.deaths, report)
    shutil.rmtree(settings.folder, ignore_errors=True)


def _start(settings: ForkServerSettings, rank: int) -> int:
    """Fork a rank, or spawn a fresh interpreter: CUDA and libraries that use it do not survive a fork."""
    pipes, listener = settings.pipes[rank], settings.listener if rank == 0 else None
    inherited = {*pipes, settings.lifeline, *(() if listener is None else (listener,))}
    if settings.method == "spawn":
        for descriptor in settings.descriptors:
            os.set_inheritable(descriptor, descriptor in inherited)
        arguments = [",".join(map(str, pipes)), str(settings.lifeline), "" if listener is None else str(listener)]
        command = [sys.executable, "-P", "-m", "prefect_rlhf.engines.gang.processes.rank_process", *arguments]
        with handed_over(command, os.environ) as (started, at_start, hidden):
            os.set_inheritable(hidden, True)
            return os.posix_spawn(sys.executable, started, at_start)
    pid = os.fork()
    if pid:
        return pid
    for descriptor in set(settings.descriptors) - inherited:
        os.close(descriptor)
    from prefect_rlhf.engines.gang.processes.rank_process import run

    return run(pipes, settings.lifeline, listener)


def _kill_all_on_terminate(ranks: dict[int, int]) -> None:
    """Let SIGTERM kill the ranks that are not reaped yet, so never another process that reuses a rank's pid."""

    def kill_all(signum: int, frame: FrameType | None) -> None:
        for pid in list(ranks):
            os.kill(pid, signal.SIGKILL)

    signal.signal(signal.SIGTERM, kill_all)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})


if __name__ == "__main__":
    main(ForkServerSettings(**json.loads(sys.argv[1])))
    os._exit(0)  # without the destructors of modules that were imported for the ranks only
