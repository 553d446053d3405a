"""Environments with steps: the seed for `reset`, texts of observations, and a loop of steps and turns."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
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
    """Return the seed for an environment's `reset`, equal for all rows of a prompt. Many generators accept at most 32
    bits.

    >>> seed_of({"seed": 3, "group_seed": 2**62 + 7})
    7
    """
    return int(row["group_seed"]) % 2**32


async def steps(
    row: Mapping[str, Any],
    say: Model,
    opening: object,
    step: Callable[[str], Awaitable[Step]],
    place: str,
    tell: Callable[[BaseException], str] | None,
) -> Mapping[str, float | None]:
    """Pass each turn of the model to `step`, and its observation to the model as a user message, until the row is over.

    The `opening` observation is added below the row's prompt, in the same message, because some chat templates refuse a
    second user message. `tell` writes a step's error for the model, which then continues; with None the play fails.
    Returns the row's numbers; its rewards are its only score.
    """
    said, errors = await say(below(row["prompt"], as_observation(opening, place))), 0
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


def below(prompt: object, observation: str) -> str:
    """Return an observation to append to a prompt: on a new line, unless it begins with white space.

    >>> below("Reply with a number.", "Say the number after 4.")
    '\\nSay the number after 4.'
    >>> below([{"role": "user", "content": "Your move"}], " on the board"), below("", "a board")
    (' on the board', 'a board')
    """
    if isinstance(prompt, Sequence) and not isinstance(prompt, str):
        asked = [turn for turn in prompt if isinstance(turn, Mapping) and turn.get("role") != "assistant"]
        prompt = asked[-1].get("content") if asked else ""
    is_apart = not prompt or not observation or observation[0].isspace()
    return observation if is_apart else f"\n{observation}"


def as_observation(value: object, place: str) -> str:
    """Return an observation. Raises PlayFailed for a value that is not text."""
    if not isinstance(value, str):
        seen = f"{in_short(value)} of type {type(value).__name__}"
        raise PlayFailed(at(f"the environment's observation is {seen}, expected text", place))
    return value
