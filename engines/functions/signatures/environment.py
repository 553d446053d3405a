"""Signature `environment`: a class as for TRL's `environment_factory`, with public methods as tools.

An instance serves a single row. `reset` gets the row's columns; its text is added to the end of the prompt. A
ValueError of a tool refuses the call. Any other error is an answer too, as in TRL, unless `tool_errors` is `fail`.
`get_reward` scores the row.
"""

import inspect
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from prefect_rlhf.engines.functions.load import at, imported, place_of
from prefect_rlhf.engines.functions.signatures.called import called
from prefect_rlhf.engines.functions.signatures.error_texts import for_the_model
from prefect_rlhf.engines.functions.signatures.first_use import made
from prefect_rlhf.engines.functions.signatures.loaded import LoadedPlay, Model, PlayFailed
from prefect_rlhf.engines.functions.signatures.play_function import PlayFunction
from prefect_rlhf.engines.functions.signatures.tools import NamedTool, by_name, converse, named_tool, with_counts
from prefect_rlhf.errors.errors import InvalidInput
from prefect_rlhf.errors.in_short import in_short

_NO_TOOLS = ("reset", "get_reward")


async def load_environment(function: PlayFunction) -> LoadedPlay:
    """Import a class, make an instance, and find its tools. Raises InvalidInput for a class that cannot be used."""
    make, keywords = imported(function), function.keywords
    if not callable(make):
        raise InvalidInput(function.field, function.function, "a class with reset, tools and get_reward")
    first = made(lambda: make(**keywords), function, "a class")
    for name in _NO_TOOLS:
        if not callable(getattr(first, name, None)):
            right = at(f"a class with a method {name}", place_of(make))
            raise InvalidInput(function.field, function.function, right)
    place = place_of(first.reset)
    found = (named_tool(method, function.field, f"{function.function}.{name}") for name, method in _methods(first))
    tell = for_the_model(function)
    tools = by_name(replace(tool, tell=tell, refusals=(ValueError,)) for tool in found)
    if not tools:
        raise InvalidInput(function.field, function.function, at("a class with public methods, the tools", place))

    async def play(row: Mapping[str, Any], say: Model) -> object:
        environment = await called(make, place, **keywords)
        opening = await called(environment.reset, place, **accepted(environment.reset, row))
        if not isinstance(opening, str | None):
            raise PlayFailed(
                at(f"reset returned {in_short(opening)} of type {type(opening).__name__}, not text", place)
            )
        of_row = {name: _bound(tool, environment) for name, tool in tools.items()}
        said = await converse(say, of_row, function.tool_format, opening)
        return with_counts(await called(environment.get_reward, place_of(environment.get_reward)), said)

    return LoadedPlay(play, place, [tool.schema for tool in tools.values()])


def accepted(method: Callable[..., Any], row: Mapping[str, Any]) -> dict[str, Any]:
    """Return the columns that a method names, or all columns if it accepts any.

    >>> accepted(lambda prompt: None, {"prompt": "a", "answer": "b"})
    {'prompt': 'a'}
    """
    parameters = inspect.signature(method).parameters
    if any(each.kind is each.VAR_KEYWORD for each in parameters.values()):
        return dict(row)
    return {name: row[name] for name in parameters if name in row}


def _methods(environment: object) -> list[tuple[str, Any]]:
    """Return the public methods except those that TRL calls itself, as TRL finds them."""
    members = inspect.getmembers(environment, predicate=inspect.ismethod)
    return [(name, each) for name, each in members if name not in _NO_TOOLS and not name.startswith("_")]


def _bound(tool: NamedTool, environment: object) -> NamedTool:
    return replace(tool, call=getattr(environment, tool.name))
