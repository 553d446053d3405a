"""Runs a command and ends after the last of its processes: a script between the worker and the flow run's process.

    python keeper.py FLOW_RUN_ID GRACE_SECONDS LOCK DEVICES FOLDER ENVIRONMENT COMMAND...

The keeper sends SIGTERM to the command when it reads `stop` from standard input, when standard input ends (the worker
is dead), or when it receives SIGTERM itself. It sends SIGKILL after the grace. However the command ends, the keeper
kills every process that descends from it or carries its flow run id. The exit status is the command's, or 128 + n for
signal n. If the worker is dead, the keeper removes the temporary `FOLDER` and becomes `close_run`, which reports the
end to the server. `DEVICES` are descriptors that hold the devices; `LOCK` is a descriptor that delays the run's next
attempt. `ENVIRONMENT` is a descriptor of the variables that no other process may read in `/proc`; the command reads
them from it too. The keeper imports the standard library only, so that it starts in milliseconds.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
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
STOP = b"stop"  # written by a living worker; end of file without it means that the worker is dead
REASON_FILE = "reason"  # in the temporary folder; the command may write the reason for its end there
REAP_SECONDS = 5.0  # a killed process is gone in milliseconds unless the kernel itself is stuck


def keep(
    flow_run_id: str, grace_seconds: float, descriptors: tuple[int, ...], environment: int | None, command: list[str]
) -> int:
    """Run `command` with `descriptors` inherited; return its exit status after its last process has ended.

    It inherits `environment` too, which is closed here.
    """
    # A process of the command may drop its environment and its session, but then it is still a child of this process
    # once its own parent has ended. So `reap` finds every process by the run's id or by its parent.
    _prctl(SET_CHILD_SUBREAPER, 1)
    stopped = _stop_requests()
    child = subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        start_new_session=True,
        pass_fds=descriptors if environment is None else (*descriptors, environment),
        preexec_fn=lambda: _prctl(SET_PARENT_DEATH_SIGNAL, signal.SIGTERM),  # in case this process is killed
    )
    if environment is not None:
        os.close(environment)  # while it is open, others can read it in /proc/PID/fd
    # With a pidfd a single select waits for the command's end, the worker's end (of standard input) and SIGTERM.
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

    Returns the pids that are still alive after a few seconds. It is empty unless the kernel cannot end a process.
    """
    # Repeated until a listing is empty: a process may fork between the listing and its SIGKILL, and the children of a
    # killed process become children of this process only then.
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
        with contextlib.suppress(OSError):  # it has ended, or belongs to another user
            stat = (process / "stat").read_text().rpartition(")")[2].split()  # after the name: state, parent, ...
            if int(stat[1]) == parent or (stat[0] != "Z" and mark in (process / "environ").read_bytes().split(b"\0")):
                yield int(process.name)


def _stop_requests() -> int:
    """Return a descriptor that becomes readable on SIGTERM.

    SIGINT is ignored: a terminal sends it to all processes, and the worker handles it.
    """
    readable, writable = os.pipe()
    os.set_blocking(writable, False)
    signal.set_wakeup_fd(writable)
    signal.signal(signal.SIGTERM, lambda *_: None)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    return readable


def _first_of(ended: int, stops: tuple[int, ...], timeout_seconds: float | None) -> bool:
    """Wait until a descriptor is readable; return whether `ended` is."""
    ready, _, _ = select.select([ended, *stops], [], [], timeout_seconds)
    return ended in ready


def _prctl(option: int, value: int) -> None:
    ctypes.CDLL(None, use_errno=True).prctl(option, value, 0, 0, 0)


def _variables(descriptor: int) -> dict[str, str]:
    variables: dict[str, str] = json.loads(os.pread(descriptor, os.fstat(descriptor).st_size, 0))
    return variables


def _reader(command: list[str], variables: dict[str, str]) -> list[str]:
    """Return the script of `command` that reads variables from a descriptor, with a descriptor of `variables`."""
    if not variables:
        return []
    descriptor = os.memfd_create("environment", 0)  # inherited
    os.write(descriptor, json.dumps(variables).encode())
    return [command[command.index("-m") - 2], str(descriptor)]


def _worker_is_dead() -> bool:
    ready, _, _ = select.select([STDIN], [], [], 0)
    return bool(ready) and os.read(STDIN, len(STOP)) == b""


def main() -> int:
    """Read the arguments, run the command and return the exit status."""
    flow_run_id, grace_seconds, lock, devices, folder, hidden, *command = sys.argv[1:]
    inherited = tuple(int(word) for word in devices.split(",") if word)
    locks = (*inherited, int(lock)) if lock else inherited
    environment = int(hidden) if hidden else None
    everything = {} if environment is None else _variables(environment)
    status = keep(flow_run_id, float(grace_seconds), locks, environment, command)
    if _worker_is_dead():
        # The devices are freed before the report, which may wait for the server for minutes. `LOCK` is passed on, so
        # that no worker starts the next attempt before the server has this attempt's end. The process image is
        # replaced: a child would be a further process that somebody has to watch.
        for descriptor in inherited:
            os.close(descriptor)  # frees the devices
        reason = Path(folder, REASON_FILE)
        words = reason.read_text() if folder and reason.is_file() else ""
        os.chdir("/")
        if folder:
            shutil.rmtree(folder, ignore_errors=True)
        del os.environ["PREFECT__FLOW_RUN_ID"]  # this process is no longer one of the run's
        everything.pop("PREFECT__FLOW_RUN_ID", None)
        close_run = [*_reader(command, everything), "-m", "prefect_rlhf.blocks.worker.close_run"]
        os.execv(sys.executable, [sys.executable, *close_run, flow_run_id, str(status), lock, words])
    return status if status >= 0 else 128 - status


if __name__ == "__main__":
    sys.exit(main())
