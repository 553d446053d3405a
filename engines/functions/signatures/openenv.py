"""Signature `openenv`: a client of an OpenEnv server; a turn is an action, and each row has a session of its own.

`reset` gets a seed that is the same for all rows of a prompt; its observation is added below the prompt. A step's
reward becomes its turn's. An error response to a step is an observation, unless `tool_errors` is `fail`. If the server
is lost, the row fails.
"""

import inspect
from collections.abc import Callable, Mapping
from typing import Any

from prefect_rlhf.engines.functions.load import at, imported, place_of
from prefect_rlhf.engines.functions.signatures.called import called
from prefect_rlhf.engines.functions.signatures.error_texts import for_the_model
from prefect_rlhf.engines.functions.signatures.loaded import LoadedPlay, Model, PlayFailed
from prefect_rlhf.engines.functions.signatures.play_function import Named, PlayFunction
from prefect_rlhf.engines.functions.signatures.texts import Step, seed_of, steps
from prefect_rlhf.errors.errors import InvalidInput

_OWN_KEYS = ("action", "action_field", "observation_field")


async def load_openenv(function: PlayFunction) -> LoadedPlay:
    """Import a client class. Raises InvalidInput for a class that is not a client, and for arguments that it lacks.

    In `play.arguments`, `action` is the class of an action (empty: a dict), `action_field` its field for the model's
    text, and `observation_field` the field of an observation that the model reads. The client gets all others.
    """
    make: Any = imported(function)
    if not all(callable(getattr(make, name, None)) for name in ("reset", "step")):
        raise InvalidInput(function.field, function.function, "a client class with reset and step")
    place, keywords = place_of(make.step), function.keywords
    for name in _OWN_KEYS:
        if not isinstance(keywords.get(name, ""), str):
            raise InvalidInput(f"play.arguments.{name}", keywords[name], "a name")
    action = _action(keywords.pop("action", ""), keywords.pop("action_field", "message"))
    field = keywords.pop("observation_field", "message")
    _check(make, keywords)
    tell = for_the_model(function)

    async def acted(client: Any, text: str) -> Any:
        return await called(client.step, place, action(text))

    async def play(row: Mapping[str, Any], say: Model) -> object:
        client = await called(make, place, **keywords)

        async def step(text: str) -> Step:
            try:
                result = await called(acted, place, client, text)
            except PlayFailed as failed:
                if _is_lost(failed.__cause__):
                    raise PlayFailed(str(failed)) from None
                raise
            return Step(_read(result.observation, field), result.reward, bool(result.done))

        try:
            opened = await called(client.reset, place, seed=seed_of(row))
            return await steps(row, say, _read(opened.observation, field), step, place, tell)
        finally:
            await called(client.close, place)

    return LoadedPlay(play, place)


def _is_lost(error: BaseException | None) -> bool:
    """Whether an error is about the connection to the server; websockets has classes of its own for that."""
    names = (each.__name__ for each in type(error).__mro__)
    return isinstance(error, OSError) or "ConnectionClosed" in names


def _check(make: Callable[..., Any], keywords: Mapping[str, Any]) -> None:
    """Raise InvalidInput for arguments that a client does not take, or that it lacks."""
    try:
        takes = inspect.signature(make)
    except ValueError:  # a class of C has no signature
        return
    try:
        takes.bind(**keywords)
    except TypeError as error:
        right = f"{', '.join(_OWN_KEYS)}, and what the client takes: {', '.join(takes.parameters)}; {error}"
        raise InvalidInput("play.arguments", ", ".join(keywords), at(right, place_of(make.__init__))) from error


def _action(name: str, field: str) -> Callable[[str], Any]:
    """Return how a text becomes an action."""
    if not name:
        return lambda text: {field: text}
    found = imported(Named(name, "play.arguments.action"))
    if not callable(found):
        raise InvalidInput("play.arguments.action", name, "the class of an action")
    return lambda text: found(**{field: text})


def _read(observation: Any, field: str) -> object:
    """Return a field of an observation, an object or a dict; None if it is missing."""
    return observation.get(field) if isinstance(observation, Mapping) else getattr(observation, field, None)
