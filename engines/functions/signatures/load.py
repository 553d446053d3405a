"""Imports a play of any signature in the process that runs it, or refuses it and says what was expected."""

import asyncio
import inspect
from collections.abc import Awaitable, Callable, Mapping
from typing import cast

from prefect_rlhf.engines.functions.load import at, imported, place_of, reason
from prefect_rlhf.engines.functions.signatures.environment import load_environment
from prefect_rlhf.engines.functions.signatures.gymnasium import load_gymnasium
from prefect_rlhf.engines.functions.signatures.loaded import LoadedPlay, Play
from prefect_rlhf.engines.functions.signatures.mcp import load_mcp
from prefect_rlhf.engines.functions.signatures.openenv import load_openenv
from prefect_rlhf.engines.functions.signatures.play_function import PlayFunction, PlaySignature
from prefect_rlhf.engines.functions.signatures.tools import load_tools
from prefect_rlhf.errors.errors import InvalidInput


async def load_play(function: PlayFunction) -> LoadedPlay:
    """Import a play. Raises InvalidInput for code that cannot be imported, or that its signature cannot call."""
    try:
        return await _LOADERS[function.signature](function)
    except (InvalidInput, asyncio.CancelledError):
        raise
    except BaseException as error:  # a property or a class of the person may raise anything
        expected = f"code that signature {function.signature} can use: {reason(error, '')}"
        raise InvalidInput(function.field, function.function, expected) from error


async def load_coroutine(function: PlayFunction) -> LoadedPlay:
    """Import a coroutine function. Raises InvalidInput unless it is `async def play(row, say)`."""
    found = imported(function)
    place = place_of(found)
    expected = at("a coroutine function: async def play(row, say)", place)
    if not callable(found) or not inspect.iscoroutinefunction(found):
        raise InvalidInput(function.field, function.function, expected)
    try:
        inspect.signature(found).bind(None, None)
    except TypeError as error:
        raise InvalidInput(function.field, function.function, f"{expected}; {error}") from error
    return LoadedPlay(cast(Play, found), place)


_LOADERS: Mapping[PlaySignature, Callable[[PlayFunction], Awaitable[LoadedPlay]]] = {
    "play": load_coroutine,
    "tools": load_tools,
    "environment": load_environment,
    "gymnasium": load_gymnasium,
    "openenv": load_openenv,
    "mcp": load_mcp,
}
