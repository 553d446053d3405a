"""Signature `gymnasium`: an environment whose actions and observations are texts; a turn is an action.

`reset` gets a seed that is the same for all rows of a prompt; its observation is added below the prompt. A step's
reward becomes its turn's. An error of a step is an observation, unless `tool_errors` is `fail`.
"""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from prefect_rlhf.engines.functions.load import at, imported, place_of
from prefect_rlhf.engines.functions.signatures.called import called
from prefect_rlhf.engines.functions.signatures.error_texts import for_the_model
from prefect_rlhf.engines.functions.signatures.first_use import made, package
from prefect_rlhf.engines.functions.signatures.loaded import LoadedPlay, Model
from prefect_rlhf.engines.functions.signatures.play_function import PlayFunction
from prefect_rlhf.engines.functions.signatures.texts import Step, seed_of, steps
from prefect_rlhf.errors.errors import InvalidInput
from prefect_rlhf.errors.in_short import in_short


async def load_gymnasium(function: PlayFunction) -> LoadedPlay:
    """Make an environment as a test. Raises InvalidInput for an environment that cannot be made, or has other
    spaces.
    """
    make = _maker(function)
    first = made(make, function, "an environment")
    if not hasattr(first, "unwrapped"):
        right = at(f"an environment of gymnasium, not {in_short(first)}", place_of(make))
        raise InvalidInput(function.field, function.function, right)
    place = place_of(first.unwrapped.step)
    for space in (first.action_space, first.observation_space):
        if type(space).__name__ != "Text":
            right = at(f"an environment whose actions and observations are Text spaces, not {space}", place)
            raise InvalidInput(function.field, function.function, right)
    first.close()

    tell = for_the_model(function)

    async def play(row: Mapping[str, Any], say: Model) -> object:
        environment = await called(make, place)

        async def step(action: str) -> Step:
            observation, reward, is_ended, is_cut, _ = await called(environment.step, place, action)
            return Step(observation, float(reward), bool(is_ended or is_cut))

        try:
            opening, _ = await called(environment.reset, place, seed=seed_of(row))
            return await steps(row, say, opening, step, place, tell)
        finally:
            await called(environment.close, place)

    return LoadedPlay(play, place)


def _maker(function: PlayFunction) -> Callable[[], Any]:
    gymnasium = package("gymnasium", "gymnasium")
    if function.is_gymnasium_id:
        return partial(gymnasium.make, function.function, **function.keywords)
    found = imported(function)
    if not callable(found):
        raise InvalidInput(function.field, function.function, "an id, or a function that makes an environment")
    return partial(found, **function.keywords)
