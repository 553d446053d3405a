"""Plays that do the same when they are played again, and others."""

import random
import time
from types import SimpleNamespace


async def same(row, say):
    """Dice from the row's own seed, in each of four turns."""
    dice = random.Random(row["seed"])
    said = await say()
    while said.end == "stop":
        say.reward(dice.random())
        said = await say(f" {row['prompt']} the film")
    assert (said.end, said.turn) == ("budget", 3)
    return {"score": len(said.text), "turns": said.turn}


seen: list[str] = []


async def other_answer(row, say):
    """A count of all plays so far, in the second answer of the second row."""
    await say()
    await say(" the film")
    seen.append(row["prompt"])
    await say(" the best film" if len(seen) > 3 and row["seed"] == 1 else " a bad film")
    return 0.0


async def other_score(row, say):
    await say()
    say.reward(time.monotonic())
    return


async def other_last_turn(row, say):
    """A clock after all turns that the model ended itself."""
    said = await say()
    while said.end == "stop":
        said = await say("the film")
    return time.monotonic()


async def other_after_empty_answers(row, say):
    """A count of all plays so far, in an answer after two answers without text."""
    await say()
    await say("")
    await say("")
    seen.append(row["prompt"])
    await say("the best film" if len(seen) > 2 else "a bad film")
    return 0.0


async def more_empty_answers(row, say):
    """The answer without text is an answer; when it is played again, the row ends."""
    await say()
    if len(seen) < 2:
        await say("")
    seen.append("")
    return 0.0


async def other_end(row, say):
    """The first row goes on when it is played again."""
    await say()
    if seen:
        await say(" the film")
    seen.append("")
    return 0.0


async def fails(row, say):
    said = await say()
    return 1 / (len(said.tokens) - 8)


class Opens:
    """An environment in the form of TRL's, whose text before the first turn comes from a clock."""

    def reset(self, **row):
        return " film" * (1 + time.monotonic_ns() % 1000)

    def look(self, number: int) -> str:
        """Look.

        Args:
            number: A number.
        """
        return "the film"

    def get_reward(self):
        return 0.0


class NeverSteps:
    """A client whose author made a mistake."""

    def __init__(self, base_url):
        self.base_url = base_url

    def reset(self, seed):
        return SimpleNamespace(observation={"message": "film"})

    def step(self, action):
        raise NameError("no such state")

    def close(self):
        pass
