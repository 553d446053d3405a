"""Signature `openenv`: a client of an OpenEnv server; a turn is an action, and each row has a session of its own.

`reset` gets the row's seed, and its observation stands at the end of the prompt. The reward of a step is its turn's.
"""

from collections.abc import Callable, Mapping
from typing import Any

from prefect_rlhf.engines.functions.load import imported, place_of
from prefect_rlhf.engines.functions.signatures.called import called
from prefect_rlhf.engines.functions.signatures.loaded import LoadedPlay, Model
from prefect_rlhf.engines.functions.signatures.play_function import Named, PlayFunction
from prefect_rlhf.engines.functions.signatures.texts import Step, steps
from prefect_rlhf.errors.errors import InvalidInput


async def load_openenv(function: PlayFunction) -> LoadedPlay:
    """Import a client class. Raises InvalidInput for a class that is no client.

    Of `play.arguments`, `action` is the class of an action (empty: a dict), `action_field` its field for the model's
    text, and `observation_field` the field of an observation that the model reads. The client gets all others.
    """
    make: Any = imported(function)
    if not all(callable(getattr(make, name, None)) for name in ("reset", "step")):
        raise InvalidInput(function.field, function.function, "a client class with reset and step")
    place, keywords = place_of(make.step), function.keywords
    action = _action(keywords.pop("action", ""), keywords.pop("action_field", "message"))
    field = keywords.pop("observation_field", "message")

    async def play(row: Mapping[str, Any], say: Model) -> None:
        client = await called(make, place, **keywords)

        async def step(text: str) -> Step:
            result = await called(client.step, place, action(text))
            return Step(_read(result.observation, field), result.reward, bool(result.done))

        try:
            opened = await called(client.reset, place, seed=row["seed"])
            await steps(say, _read(opened.observation, field), step, place)
        finally:
            await called(client.close, place)

    return LoadedPlay(play, place)


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
