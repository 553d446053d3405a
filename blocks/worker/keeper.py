"""Run one command and outlive nothing of it: started as a script between the worker and the flow run's process.

    python keeper.py FLOW_RUN_ID GRACE_SECONDS LOCK DEVICES FOLDER COMMAND...

The command gets SIGTERM when standard input says `stop` or ends (the worker is dead) or on SIGTERM, and SIGKILL after
the grace. However it ends, every process that descends from it or carries its flow run id is killed. The exit status
is the command's, 128 + n for signal n; with a dead worker this process removes the temporary `FOLDER` and becomes
`close_run`, which tells the server. `DEVICES` are descriptors that hold the devices, `LOCK` is one that keeps the run's
next attempt away. Only the standard library, so that it starts in milliseconds.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import select
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

STDIN = 0
SET_PARENT_DEATH_SIGNAL = 1  # prctl(2)
SET_CHILD_SUBREAPER = 36
STOP = b"stop"  # what a living worker writes; end of file without it means that the worker is dead
REASON_FILE = "reason"  # in the temporary folder; where the command may leave why it ended
REAP_SECONDS = 5.0  # a killed process is gone in milliseconds unless the kernel itself is stuck


def keep(flow_run_id: str, grace_seconds: float, descriptors: tuple[int, ...], command: list[str]) -> int:
    """Run `command` with `descriptors` inherited; return its exit status once nothing of it is left."""
    _prctl(SET_CHILD_SUBREAPER, 1)  # orphans of the command become children of this process, so none can hide
    stopped = _stop_requests()
    child = subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        start_new_session=True,
        pass_fds=descriptors,
        preexec_fn=lambda: _prctl(SET_PARENT_DEATH_SIGNAL, signal.SIGTERM),  # should this process be killed
    )
    ended = os.pidfd_open(child.pid)
    try:
        if not _first_of(ended, (STDIN, stopped), None):
            child.terminate()
            _first_of(ended, (), grace_seconds)
    finally:
        child.kill()
        status = child.wait()
        reap(flow_run_id, parent=os.getpid())
    return status


def reap(flow_run_id: str, parent: int | None = None) -> tuple[int, ...]:
    """Kill every process that carries `flow_run_id` in its environment, and every child of process `parent` if given.

    Returns the pids that are still there after a few seconds: none, unless the kernel does not let go of them.
    """
    deadline = time.monotonic() + REAP_SECONDS
    while left := tuple(_processes_of(flow_run_id, parent)):
        if time.monotonic() > deadline:
            return left
        for pid in left:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        with contextlib.suppress(ChildProcessError):
            while parent == os.getpid() and os.waitpid(-1, os.WNOHANG)[0]:
                pass  # collects the children of this process
        time.sleep(0.02)
    return ()


def _processes_of(flow_run_id: str, parent: int | None) -> Iterator[int]:
    mark = f"PREFECT__FLOW_RUN_ID={flow_run_id}".encode()
    for process in Path("/proc").iterdir():
        if not process.name.isdigit() or int(process.name) == os.getpid():
            continue
        with contextlib.suppress(OSError):  # it ended, or is another user's
            stat = (process / "stat").read_text().rpartition(")")[2].split()  # after the name: state, parent, ...
            if int(stat[1]) == parent or (stat[0] != "Z" and mark in (process / "environ").read_bytes().split(b"\0")):
                yield int(process.name)


def _stop_requests() -> int:
    """Return a descriptor that becomes readable on SIGTERM; SIGINT, sent by a terminal to all, is the worker's."""
    readable, writable = os.pipe()
    os.set_blocking(writable, False)
    signal.set_wakeup_fd(writable)
    signal.signal(signal.SIGTERM, lambda *_: None)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    return readable


def _first_of(ended: int, stops: tuple[int, ...], timeout_seconds: float | None) -> bool:
    """Wait for one of the descriptors; return whether it is `ended`."""
    ready, _, _ = select.select([ended, *stops], [], [], timeout_seconds)
    return ended in ready


def _prctl(option: int, value: int) -> None:
    ctypes.CDLL(None, use_errno=True).prctl(option, value, 0, 0, 0)


def _worker_is_dead() -> bool:
    ready, _, _ = select.select([STDIN], [], [], 0)
    return bool(ready) and os.read(STDIN, len(STOP)) == b""


def main() -> int:
    """Read the arguments and keep the command."""
    flow_run_id, grace_seconds, lock, devices, folder, *command = sys.argv[1:]
    inherited = tuple(int(word) for word in devices.split(",") if word)
    locks = (*inherited, int(lock)) if lock else inherited
    status = keep(flow_run_id, float(grace_seconds), locks, command)
    if _worker_is_dead():
        for descriptor in inherited:
            os.close(descriptor)  # frees the devices
        reason = Path(folder, REASON_FILE)
        words = reason.read_text() if folder and reason.is_file() else ""
        os.chdir("/")
        if folder:
            shutil.rmtree(folder, ignore_errors=True)
        del os.environ["PREFECT__FLOW_RUN_ID"]  # this process is no longer one of the run's
        close_run = [sys.executable, "-m", "prefect_rlhf.blocks.worker.close_run"]
        os.execv(sys.executable, [*close_run, flow_run_id, str(status), lock, words])
    return status if status >= 0 else 128 - status


if __name__ == "__main__":
    sys.exit(main())
