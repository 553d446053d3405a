"""The process above a worker: it ends with the worker or with the pool's process, and kills the worker's children.

It is a subreaper (prctl(2)): the kernel makes it the parent of every orphan below it, so it also finds a daemon in a
session of its own. The worker is forked from it, so the worker's own process has no other duty.
"""

import ctypes
import faulthandler
import os
import select
import signal
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import NoReturn

_SET_PARENT_DEATH_SIGNAL, _SET_CHILD_SUBREAPER = 1, 36  # prctl(2)
_REAP_SECONDS = 5.0  # a killed process is gone in milliseconds unless the kernel itself is stuck


def fork_below_reaper(channel: int, lifeline: int) -> None:
    """Return in a child with its own process group. This process becomes the child's reaper, and never returns.

    The reaper closes its descriptor `channel`. It kills all processes below it when the pipe `lifeline` has data or
    ends, or when the child has ended. Then it ends with the child's status.
    """
    _prctl(_SET_CHILD_SUBREAPER, 1)
    woken, wake = os.pipe()
    os.set_blocking(wake, False)
    signal.set_wakeup_fd(wake)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    reaper, child = os.getpid(), os.fork()
    if child:
        os.close(channel)
        _end_as(_watch(child, lifeline, woken))
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    signal.set_wakeup_fd(-1)
    os.close(woken)
    os.close(wake)
    os.setpgid(0, 0)
    _prctl(_SET_PARENT_DEATH_SIGNAL, signal.SIGKILL)
    if os.getppid() != reaper:  # it ended before the prctl, which then sends no signal
        os._exit(1)


def _watch(child: int, lifeline: int, woken: int) -> int:
    """Wait for the end of the child or of the lifeline, then kill all processes below; return the child's exit code."""
    codes: dict[int, int] = {}
    while child not in codes:
        ready, _, _ = select.select([lifeline, woken], [], [])
        if lifeline in ready:
            break
        os.read(woken, 4096)
        codes.update(_collected())
    # A killed process leaves its own children to this subreaper, so the children are listed and killed again until
    # waitpid reports that no child is left.
    deadline = time.monotonic() + _REAP_SECONDS
    with suppress(ChildProcessError):  # raised when no child is left
        while time.monotonic() < deadline:
            for pid in _children():
                os.kill(pid, signal.SIGKILL)
            codes.update(_collected(must_have=True))
            time.sleep(0.001)
    return codes.get(child, 0)


def _collected(*, must_have: bool = False) -> Iterator[tuple[int, int]]:
    """Yield the pid and exit code of each ended child. With `must_have`, raise ChildProcessError without a child."""
    try:
        while (ended := os.waitpid(-1, os.WNOHANG))[0]:
            yield ended[0], os.waitstatus_to_exitcode(ended[1])
    except ChildProcessError:
        if must_have:
            raise


def _children() -> Iterator[int]:
    """Yield the pids of this process's children, including adopted orphans."""
    for process in Path("/proc").iterdir():
        with suppress(OSError, ValueError):  # it has ended, or is not a process
            parent = int((process / "stat").read_text().rpartition(")")[2].split()[1])  # after the name: state, parent
            if parent == os.getpid():
                yield int(process.name)


def _end_as(code: int) -> NoReturn:
    """End with an exit code, or by signal -code if it is negative."""
    if code < 0:
        faulthandler.disable()  # the child has reported its own crash
        with suppress(OSError):  # SIGKILL has no handler to set
            signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    os._exit(abs(code))


def _prctl(option: int, value: int) -> None:
    ctypes.CDLL(None, use_errno=True).prctl(option, value, 0, 0, 0)
