"""A worker process: it imports a user's functions, then calls them on the rows of each job, until it is killed.

The process that the pool starts becomes the reaper of all processes below it; the worker is its first child. Calls are
made in the main thread, where signals may be used; async calls share an event loop.
"""

import asyncio
import fcntl
import os
import resource
import select
import signal
import socket
import sys
from collections.abc import Callable, Sequence
from typing import NoReturn

from prefect_rlhf.engines.functions.call import LoopDelay, call, call_async
from prefect_rlhf.engines.functions.load import LoadedFunction, load
from prefect_rlhf.engines.functions.messages import (
    Begun,
    Done,
    Job,
    Loaded,
    Loading,
    Refused,
    Said,
    Start,
    line_of,
    received,
)
from prefect_rlhf.engines.functions.reaper import fork_below_reaper
from prefect_rlhf.errors.errors import InvalidInput

Say = Callable[[Said], None]


def die_with(lifeline: int) -> None:
    """From now on, kill the group of this process when `lifeline` has a byte or no process holds its other end."""
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


def main(channel: int, lifeline: int) -> None:
    """Serve a channel, a socket's descriptor, until its other end is closed."""
    connection = connected(channel, lifeline)
    stream = connection.makefile("rb")
    try:
        serve(received(stream), lambda: received(stream), lambda said: connection.sendall(line_of(said)))
    except (EOFError, ConnectionError):
        return


def serve(start: Start, next_job: Callable[[], Job], say: Say) -> NoReturn:
    """Import the functions, then do the jobs one after another. Raises EOFError after the last job."""
    sys.path += [folder for folder in start.path if folder not in sys.path]
    functions = load_all(start, say)
    with asyncio.Runner() as runner:
        while True:
            job = next_job()
            function = functions[job.function]
            if function.asynchronous:
                runner.run(do_async(function, job, start, say))
            else:
                do(function, job, runner, say)


def load_all(start: Start, say: Say) -> Sequence[LoadedFunction]:
    """Import every function. Raises EOFError if a function is refused: then no work is left."""
    functions = []
    for number, function in enumerate(start.functions):
        say(Loading(number))
        try:
            loaded = load(function)
        except InvalidInput as error:
            say(Refused(number, str(error.seen), error.expected))
            raise EOFError from error
        functions.append(loaded)
        say(Loaded(number, loaded.asynchronous, loaded.named, loaded.place))
    return functions


def do(function: LoadedFunction, job: Job, runner: asyncio.Runner, say: Say) -> None:
    """Make the calls of a job one after another; the pool enforces their deadlines."""
    for number, rows in job.calls.items():
        say(Begun(number))
        say(Done(number, call(function, rows, runner)))


async def do_async(function: LoadedFunction, job: Job, start: Start, say: Say) -> None:
    """Make the calls of a job, `start.concurrent` at a time."""
    free, delay = asyncio.Semaphore(start.concurrent), LoopDelay()

    async def make(number: int) -> None:
        async with free:
            say(Begun(number))
            say(Done(number, await call_async(function, job.calls[number], start.deadline_seconds, delay)))

    watch = asyncio.create_task(delay.watch())
    try:
        await asyncio.gather(*(make(number) for number in job.calls))
    finally:
        watch.cancel()


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]))
    os._exit(0)  # without waiting for a user's threads and exit handlers
