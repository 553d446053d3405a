"""Calls your function from an event loop: a coroutine function in the loop, any other in a thread."""

import asyncio
import inspect
from collections.abc import Callable
from threading import Thread
from typing import Any

from prefect_rlhf.engines.functions.load import reason
from prefect_rlhf.engines.functions.signatures.loaded import PlayFailed

Outcome = tuple[Any, BaseException | None]


async def called(function: Callable[..., Any], place: str, /, *arguments: Any, **keywords: Any) -> Any:
    """Return the result of a function. Raises PlayFailed, with its place, for every error of the function.

    A thread that does not end in time is abandoned; it ends with its process.
    """
    try:
        if inspect.iscoroutinefunction(function):
            return await function(*arguments, **keywords)
        returned, error = await _in_thread(lambda: function(*arguments, **keywords))
        if error is not None:
            raise error
        return await returned if inspect.isawaitable(returned) else returned
    except asyncio.CancelledError as error:  # its text is the place of the code that was too slow
        raise asyncio.CancelledError(place) from error
    except PlayFailed:
        raise
    except BaseException as error:  # a person's code may raise anything, SystemExit too
        raise PlayFailed(reason(error, place)) from error


def _in_thread(function: Callable[[], Any]) -> asyncio.Future[Outcome]:
    """Begin a call in a thread; the future has its result, and its error."""
    loop = asyncio.get_running_loop()
    future: asyncio.Future[Outcome] = loop.create_future()

    def settle(outcome: Outcome) -> None:
        if not future.done():  # else the play was ended meanwhile
            future.set_result(outcome)

    def run() -> None:
        try:
            outcome: Outcome = function(), None
        except BaseException as error:  # noqa: BLE001  as above
            outcome = None, error
        loop.call_soon_threadsafe(settle, outcome)

    # A pool would have a most number of threads, and tools that hang would hold them all.
    Thread(target=run, name="a tool", daemon=True).start()
    return future
