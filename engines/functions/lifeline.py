"""How a worker's process starts below its reaper: with a channel, and a pipe that ends its life."""

import fcntl
import os
import resource
import select
import signal
import socket

from prefect_rlhf.engines.functions.reaper import fork_below_reaper


def die_with(lifeline: int) -> None:
    """From now on, kill this process's group when `lifeline` has a byte or no process holds its other end."""
    fcntl.fcntl(lifeline, fcntl.F_SETOWN, -os.getpgid(0))
    fcntl.fcntl(lifeline, fcntl.F_SETSIG, signal.SIGKILL)
    fcntl.fcntl(lifeline, fcntl.F_SETFL, fcntl.fcntl(lifeline, fcntl.F_GETFL) | os.O_ASYNC)
    if select.select([lifeline], [], [], 0)[0]:  # it ended before O_ASYNC was set, so no signal comes
        os.killpg(0, signal.SIGKILL)


def connected(channel: int, lifeline: int) -> socket.socket:
    """Return the channel, a socket's descriptor, in a child below a reaper; see `fork_below_reaper` and `die_with`."""
    for descriptor in (channel, lifeline):
        os.set_inheritable(descriptor, False)  # processes of a user's function must not keep them open
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # a crash is reported, and leaves no core file
    fork_below_reaper(channel, lifeline)
    die_with(lifeline)
    return socket.socket(fileno=channel)
