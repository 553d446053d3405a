"""A game with rewards per turn: the model guesses a code of three digits, and each answer shows a further digit.

A guess that agrees with the digits shown so far earns 0.1, any other turn costs 0.1, and the right code earns 1. Each
prompt has a code of its own, which it does not show; no code is both in training and held out.
"""

from __future__ import annotations

import random
import re
from collections.abc import Mapping
from typing import Any

NUM_TRAIN, NUM_HELD_OUT = 480, 60
DIGITS = 3
SHOWN = (
    {"role": "system", "content": "Guess the code of three digits. Write only the code."},
    {"role": "user", "content": "Door 5?"},
    {"role": "assistant", "content": "628"},
    {"role": "user", "content": "3__"},
    {"role": "assistant", "content": "317"},
)
"""The format: a first guess, an answer, and a second guess that agrees with it."""
GUESS = re.compile(r"\s*(\d{3})\s*")


def tasks(seed: int = 0) -> dict[str, list[Any]]:
    """Return the columns of all doors: `prompt` (a chat), `code` and `split`."""
    codes = random.Random(seed).sample(range(10 ** (DIGITS - 1), 10**DIGITS), NUM_TRAIN + NUM_HELD_OUT)
    return {
        "prompt": [[*SHOWN, {"role": "user", "content": f"Door {10 + door}?"}] for door in range(len(codes))],
        "code": list(map(str, codes)),
        "split": ["train"] * NUM_TRAIN + ["held_out"] * NUM_HELD_OUT,
    }


async def opens(row: Mapping[str, Any], say: Any) -> dict[str, float]:
    """Show a further digit after each wrong guess, until the guess is right or all turns are used."""
    said = await say()
    for shown in range(DIGITS + 1):
        guess = GUESS.fullmatch(said.text)
        if guess and guess[1] == row["code"]:
            return {"score": 1.0, "solved": 1.0}
        fits = guess is not None and guess[1].startswith(row["code"][:shown])
        say.reward(0.1 if fits else -0.1)
        if shown < DIGITS:
            said = await say({"role": "user", "content": row["code"][: shown + 1].ljust(DIGITS, "_")})
    return {"score": 0.0, "solved": 0.0}
