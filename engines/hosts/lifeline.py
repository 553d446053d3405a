"""The end of a worker with its pool's process: the kernel kills the worker's group when the pool's pipe is closed.

The kernel does it by a signal. A thread, as in ranks, would not do: a user's function may hold the interpreter forever.
The worker's reaper (`reaper.py`) reads the same pipe and ends processes that have left the group, such as a daemon.
"""

import fcntl
import os
import select
import signal


def die_with(lifeline: int) -> None:
    """From now on, kill the group of this process when `lifeline` has a byte or no process holds its other end."""
    fcntl.fcntl(lifeline, fcntl.F_SETOWN, -os.getpgid(0))
    fcntl.fcntl(lifeline, fcntl.F_SETSIG, signal.SIGKILL)
    fcntl.fcntl(lifeline, fcntl.F_SETFL, fcntl.fcntl(lifeline, fcntl.F_GETFL) | os.O_ASYNC)
    if select.select([lifeline], [], [], 0)[0]:  # it ended before O_ASYNC was set, so no signal comes
        os.killpg(0, signal.SIGKILL)
