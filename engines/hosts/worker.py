"""A worker process: imports a person's functions, then calls them on the rows that it is sent, until it is killed.

The process that the pool starts becomes the reaper of everything below it, the first of which is the worker.
Calls are made in the main thread, where signals may be used; async ones share one event loop.
"""

from __future__ import annotations

import asyncio
import os
import resource
import socket
import sys
from collections.abc import Callable, Sequence
from typing import NoReturn

from prefect_rlhf.engines.hosts.call import LoopDelay, call, call_async
from prefect_rlhf.engines.hosts.lifeline import die_with
from prefect_rlhf.engines.hosts.load import LoadedFunction, load
from prefect_rlhf.engines.hosts.messages import (
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
from prefect_rlhf.engines.hosts.reaper import fork_below_reaper
from prefect_rlhf.placement.errors import InvalidInput

Say = Callable[[Said], None]


def main(channel: int, lifeline: int) -> None:
    """Serve a channel, a socket's descriptor, until its other end is closed."""
    for descriptor in (channel, lifeline):
        os.set_inheritable(descriptor, False)  # not by what a person's function starts
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # a crash is told, and leaves no file
    fork_below_reaper(channel, lifeline)
    die_with(lifeline)
    connection = socket.socket(fileno=channel)
    stream = connection.makefile("rb")
    try:
        serve(received(stream), lambda: received(stream), lambda said: connection.sendall(line_of(said)))
    except (EOFError, ConnectionError):
        return


def serve(start: Start, next_job: Callable[[], Job], say: Say) -> NoReturn:
    """Import, then do one job after another. Raises EOFError when there are no more."""
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
    """Import every function. Raises EOFError where one is refused: then there is nothing to do."""
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
    """Make the calls of a job one after another; whoever waits for them knows how long they may take."""
    for number, rows in job.calls.items():
        say(Begun(number))
        say(Done(number, call(function, rows, runner)))


async def do_async(function: LoadedFunction, job: Job, start: Start, say: Say) -> None:
    """Make the calls of a job, some at a time."""
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
    os._exit(0)  # a person's threads and exit handlers hold nothing up
