"""Plays for runs of tiny models."""

import asyncio
import os
import signal
from pathlib import Path


async def counts(row, say):
    """Two turns; short turns are better, and the second turn counts twice."""
    said = await say()
    say.reward(-0.1 * len(said.tokens))
    said = await say(f" the {row['number'] % 3 and 'film' or 'best film'}")
    return {"score": -0.2 * len(said.tokens), "characters": len(said.text)}


async def guesses(row, say):
    """A task of the group: rows of a prompt have the same secret."""
    secret = row["group_seed"] % 5
    said = await say()
    while said.end == "stop" or said.turn < 1:
        said = await say(" a good film")
        if said.end == "budget":
            break
    return {"score": float(len(said.tokens) % 5 == secret), "secret": float(secret)}


async def trapped(row, say):
    """Two turns; between them the row meets a trap that a test may have set: its worker dies, or it hangs."""
    said = await say()
    say.reward(-0.1 * len(said.tokens))
    trap = Path(row["traps"]) / str(row["number"])
    if trap.exists():
        kind = trap.rename(f"{trap}.sprung").read_text()
        if kind == "dies":
            os.kill(os.getpid(), signal.SIGKILL)
        await asyncio.sleep(3600)
    said = await say(" the best film")
    return -0.2 * len(said.tokens)


async def dies(row, say):
    await say()
    raise RuntimeError("the environment is gone")


def film_of(number: int) -> str:
    """the best film

    Args:
        number: The number of a film.
    """
    return "best_film" if number >= 0 else "bad"


def answers(row):
    """The number of answers of tools."""
    return float(sum(message["role"] == "tool" for message in row["messages"]))


async def asks_twice(row, say):
    """A reward for each turn, and a score."""
    said = await say()
    say.reward(0.5 * len(set(said.tokens)))
    said = await say("good film it is")
    say.reward(-0.25)
    return sum(said.tokens) % 5
