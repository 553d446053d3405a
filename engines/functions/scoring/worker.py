"""A worker process: it imports a user's functions, then calls them on the rows of each job, until it is killed.

The process that the pool starts becomes the reaper of all processes below it; the worker is its first child. Calls are
made in the main thread, where signals may be used; async calls share an event loop.
"""

import asyncio
import os
import sys
from collections.abc import Callable, Sequence
from typing import NoReturn

from prefect_rlhf.engines.functions.call import LoopDelay, call, call_async
from prefect_rlhf.engines.functions.lifeline import connected
from prefect_rlhf.engines.functions.load import LoadedFunction, load
from prefect_rlhf.engines.functions.message import Refused, line_of, received
from prefect_rlhf.engines.functions.scoring.messages import Begun, Done, Job, Loaded, Loading, Said, Start
from prefect_rlhf.errors.errors import InvalidInput

Say = Callable[[Said], None]


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
            say(Refused(error.field, str(error.seen), error.expected))
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
    """Make a job's calls, `start.concurrent` at a time."""
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
