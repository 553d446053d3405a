"""The end of a worker with its pool's process: the kernel kills the worker's group when the pool's pipe is closed.

By a signal of the kernel's, not by a thread, as in ranks: a person's function may hold the interpreter for ever. What
has left the group, such as a daemon, is ended by the worker's reaper (`reaper.py`), which reads the same pipe.
"""

from __future__ import annotations

import fcntl
import os
import select
import signal


def die_with(lifeline: int) -> None:
    """From now on, the group of this process is killed when `lifeline` has a byte or nobody holds its other end."""
    fcntl.fcntl(lifeline, fcntl.F_SETOWN, -os.getpgid(0))
    fcntl.fcntl(lifeline, fcntl.F_SETSIG, signal.SIGKILL)
    fcntl.fcntl(lifeline, fcntl.F_SETFL, fcntl.fcntl(lifeline, fcntl.F_GETFL) | os.O_ASYNC)
    if select.select([lifeline], [], [], 0)[0]:  # it ended before
        os.killpg(0, signal.SIGKILL)
