"""Environments with steps: the seed of their start, texts of observations, and a loop of steps and turns."""

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Any

from prefect_rlhf.engines.functions.load import at
from prefect_rlhf.engines.functions.signatures.error_texts import error_answer
from prefect_rlhf.engines.functions.signatures.loaded import Model, PlayFailed
from prefect_rlhf.errors.in_short import in_short


@dataclass(frozen=True, slots=True)
class Step:
    """The result of an action: an observation, the turn's reward (None: no reward), and whether the row is over."""

    observation: object
    reward: float | None
    is_over: bool


def seed_of(row: Mapping[str, Any]) -> int:
    """Return the seed of an environment's start: rows of a prompt start alike. Many generators take 32 bits at most.

    >>> seed_of({"seed": 3, "group_seed": 2**62 + 7})
    7
    """
    return int(row["group_seed"]) % 2**32


async def steps(
    say: Model,
    opening: object,
    step: Callable[[str], Awaitable[Step]],
    place: str,
    tell: Callable[[BaseException], str] | None,
) -> Mapping[str, float | None]:
    """Pass each turn of the model to `step`, and its observation to the model as a user's message, until it is over.

    `tell` writes an error of a step for the model, which goes on then; None: the play fails. Returns numbers of a row
    without a score besides its rewards.
    """
    said, errors = await say(as_observation(opening, place)), 0
    while said.end != "budget" or said.text:
        try:
            took = await step(said.text)
        except PlayFailed as failed:
            if failed.__cause__ is None or tell is None:
                raise
            took = Step(error_answer(tell(failed.__cause__)), None, is_over=False)
            errors += 1
        if took.reward is not None:
            say.reward(took.reward)
        if took.is_over or said.end == "budget":
            break
        said = await say({"role": "user", "content": as_observation(took.observation, place)})
    return {"score": None, "tool_errors": float(errors)}


def as_observation(value: object, place: str) -> str:
    """Return an observation. Raises PlayFailed for a value that is no text."""
    if not isinstance(value, str):
        seen = f"{in_short(value)} of type {type(value).__name__}"
        raise PlayFailed(at(f"the environment's observation is {seen}, expected text", place))
    return value
