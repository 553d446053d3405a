"""Plays of a person, good and bad."""

import asyncio
import os
import sys
import time
from pathlib import Path


async def three_turns(row, say):
    """Count the characters of what the model said."""
    said = await say()
    for _ in range(2):
        say.reward(len(said.text))
        said = await say(f"<{row['prompt']}{len(said.text)}>")
    return {"score": 1.0, "turns": said.turn + 1}


async def raises(row, say):
    await say()
    if row["prompt"] == "bad":
        raise LookupError("no such tool")
    return 1.0


async def hangs(row, say):
    await say()
    if row["prompt"] == "bad":
        await asyncio.sleep(60)
    return 1.0


async def blocks(row, say):
    await say()
    if row["prompt"] == "bad":
        time.sleep(60)  # noqa: ASYNC251  an event loop that is blocked
    return 1.0


async def exits(row, say):
    said = await say()
    if row["prompt"] == "bad":
        os._exit(3)
    said = await say("go on")
    return float(said.turn)


async def dies_once(row, say):
    """Three turns; after the first, a row may end its process."""
    said = await say()
    for _ in range(2):
        die_once(row)
        said = await say(row["prompt"])
    return float(said.turn)


async def die_together(row, say):
    """The same while other plays of the process wait for something of their own."""
    said = await say()
    for _ in range(2):
        if row["dies"]:
            await asyncio.sleep(0.2)
            die_once(row)
        await asyncio.sleep(0.4)
        said = await say(row["prompt"])
    return float(said.turn)


INSIDE: list[str] = []


async def single_instance(row, say):
    """Two turns, between which a row may end its process. A process has a single such play at a time."""
    if INSIDE:
        raise RuntimeError("this process has such a play already")
    INSIDE.append(row["prompt"])
    try:
        await say()
        die_once(row)
        said = await say("go on")
    finally:
        INSIDE.clear()
    return float(said.turn)


def die_once(row):
    """End the process if the file that the row names is there; remove it before."""
    if row["dies"] and Path(row["dies"]).exists():
        Path(row["dies"]).unlink()
        os._exit(3)


async def leaves(row, say):
    await say()
    if row["prompt"] == "bad":
        sys.exit("tired")
    return 1.0


async def not_finite(row, say):
    await say()
    return float("nan") if row["prompt"] == "bad" else 1.0


async def says_bytes(row, say):
    await say()
    if row["prompt"] == "bad":
        await say(b"\x00")
    return 1.0


async def endless_answer(row, say):
    await say()
    if row["prompt"] == "bad":
        await say("x" * (10 << 20))
    return 1.0


class Unpicklable(Exception):
    def __init__(self):
        super().__init__("not to be pickled")
        self.handle = sys.stdout

    def __reduce__(self):
        raise TypeError("no")


async def unpicklable(row, say):
    await say()
    if row["prompt"] == "bad":
        raise Unpicklable
    return 1.0


async def silent(row, say):
    if row["prompt"] != "bad":
        await say()
    return 1.0


async def never_speaks(row, say):
    if row["prompt"] == "bad":
        await asyncio.sleep(60)
    await say()
    return 1.0


async def ends_before_a_turn(row, say):
    if row["prompt"] == "bad":
        raise LookupError("no such level")
    await say()
    return 1.0


async def without_end(row, say):
    said = await say()
    while said.end != "budget":
        said = await say("more")
    assert (await say("more")).end == "budget"
    return float(said.turn)


async def sees_environment(row, say):
    await say()
    return {"score": 1.0, "secrets": float("SECRET" in os.environ), "allowed": float("ALLOWED" in os.environ)}


def not_async(row, say):
    return 1.0


async def no_say(row):
    return 1.0


async def talks(row, say):
    """Three turns with answers of two words, each after a delay that differs by row and turn."""
    said = await say()
    for turn in range(2):
        await asyncio.sleep(row["delay"] * (1 + (row["number"] + turn) % 3))
        said = await say(f"w{20 + turn} w{100 + row['number']}")
    return float(len(said.tokens))


OVER: list[int] = []


async def waits_for_the_others(row, say):
    """Two turns, in a single process; the tool of row 0 waits until all other rows are over."""
    await say()
    while row["number"] == 0 and len(OVER) < row["rows"] - 1:
        await asyncio.sleep(0.01)
    await say(f"w20 w{100 + row['number']}")
    OVER.append(row["number"])
    return 1.0


async def single_turn(row, say):
    return float(len((await say()).tokens))
