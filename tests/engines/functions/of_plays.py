"""Plays of a person, good and bad."""

import asyncio
import os
import signal
import sys
import time
from pathlib import Path

from prefect_rlhf.engines.functions.plays.messages import Asks, Over


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
    """Ask for turns until the row may have no more."""
    said = await say()
    while said.end != "budget":
        said = await say("more")
    return float(said.turn)


async def loops(row, say):
    """Ask for turns, and forget that the row may have no more."""
    said = await say()
    while row["prompt"] == "bad":
        said = await say("more")
    return float(said.turn)


async def loops_stubbornly(row, say):
    """The same, whatever `say` raises."""
    said = await say()
    while row["prompt"] == "bad":
        try:
            said = await say("more")
        except RuntimeError:
            continue
    return float(said.turn)


async def asks_wrongly(row, say):
    """Ask again and again in a way that is refused."""
    await say()
    while row["prompt"] == "bad":
        try:
            await say(b"more")
        except TypeError:
            continue
    return 1.0


async def blocks_a_little(row, say):
    """Block the event loop for longer than the deadline, but not for long enough to lose the process."""
    await say()
    if row["prompt"] == "bad":
        time.sleep(1.3)  # noqa: ASYNC251  as above
        await say("late")
    return 1.0


async def returns_late(row, say):
    await say()
    if row["prompt"] == "bad":
        time.sleep(1.3)  # noqa: ASYNC251  as above
    return 1.0


async def goes_on_after_its_deadline(row, say):
    """Catch what ends it."""
    await say()
    if row["prompt"] == "bad":
        try:
            await asyncio.sleep(60)
        except asyncio.CancelledError:
            await say("late")
    return 1.0


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


KEPT: list[asyncio.Task] = []
LATER, REFUSED = asyncio.Event(), []


async def speak(say, words, *, after=None):
    """Speak and reward after a play has ended; note what is refused."""
    if after is not None:
        await after.wait()
    for late in (lambda: say(words), lambda: say.reward(5.0)):
        try:
            made = late()
            if made is not None:
                await made
        except RuntimeError as error:
            REFUSED.append(str(error))


async def leaves_a_task(row, say):
    """Rows that leave have a task that speaks while rows of the next call are between their turns."""
    await say()
    if row["prompt"] == "leaves":
        KEPT.append(asyncio.ensure_future(speak(say, "late", after=LATER)))
        return 1.0
    LATER.set()
    await asyncio.wait(KEPT)
    said = await say("own")
    return {"score": float(said.turn), "refused": float(len(REFUSED))}


async def leaves_a_task_and_fails(row, say):
    """The first try fails; its task speaks while the second is between its turns."""
    await say()
    if not KEPT:
        KEPT.append(asyncio.ensure_future(speak(say, "late", after=LATER)))
        raise LookupError("the first time")
    LATER.set()
    await asyncio.wait(KEPT)
    said = await say("own")
    return {"score": float(said.turn), "refused": float(len(REFUSED))}


async def returns_while_it_asks(row, say):
    """Return while a task still waits for the model."""
    await say()
    if row["prompt"] == "bad":
        KEPT.append(asyncio.ensure_future(say("more")))
        await asyncio.sleep(0)
        await asyncio.sleep(0)
    return 1.0


async def gives_up_on_the_model(row, say):
    """Cancel a question that the model has, and ask another."""
    await say()
    if row["prompt"] == "bad":
        asked = asyncio.ensure_future(say("more"))
        await asyncio.sleep(0)
        asked.cancel()
        await asyncio.wait({asked})
        await say("something else")
    return 1.0


async def writes_lines(row, say):
    """Ask twice for one turn, by lines of its own to the pool."""
    await say()
    if row["prompt"] == "bad":
        for _ in range(2):
            say._ask(Asks(say._play, 1, "more"))
        await asyncio.sleep(60)
    return 1.0


async def writes_an_end(row, say):
    """End by a line of its own, with a reward of a turn that was never had."""
    await say()
    if row["prompt"] == "bad":
        say._ask(Over(say._play, 1.0, {7: 1.0}, {}))
        await asyncio.sleep(60)
    return 1.0


async def writes_for_others(row, say):
    """Speak for the plays of all earlier calls."""
    await say()
    for number in range(say._play):
        say._ask(Asks(number, 1, "more"))
    await say("go on")
    return 1.0


BEYOND = {
    "score": lambda say: 1.0000001e9,
    "far score": lambda say: 1e39,
    "reward": lambda say: say.reward(-1e39),
    "rewards": lambda say: [say.reward(1e9) for _ in range(2)] and 0.0,
    "score and reward": lambda say: say.reward(1e9) or 1.0,
    "integer": lambda say: 10**400,
    "number": lambda say: {"score": 1.0, "bytes": 1e39},
    "numbers": lambda say: {"score": 1.0} | {f"n{number}": 1.0 for number in range(65)},
    "long name": lambda say: {"score": 1.0, "n" * 101: 1.0},
    "odd name": lambda say: {"score": 1.0, "a\ud800": 1.0},
}


async def goes_beyond(row, say):
    """End at most at a bound, or beyond the one that the row names; earn in two turns."""
    await say()
    say.reward(0.0)
    if row["prompt"] in BEYOND:
        return BEYOND[row["prompt"]](say)
    return {"score": 1e9, "bytes": 1e30} | {f"{'n' * 98}{number:02}": 1.0 for number in range(63)}


async def earns_in_turns(row, say):
    """Earn what the row says, a turn each."""
    for reward in row["rewards"]:
        await say(*["go on"] * (reward is not row["rewards"][0]))
        say.reward(reward)
    return row["score"]


async def says_much(row, say):
    await say()
    await say(MUCH[row["prompt"]])
    return 1.0


def message(content="", role="user"):
    return {"role": role, "content": content}


MUCH = {
    "messages": [message("word")] * 1025,
    "role": [message(role="u" * 101)],
    "characters": [message("x" * ((1 << 22) + 1))],
    "fine": [message("x" * 200), message("y" * 100), *[message("z" * (1 << 20))] * 1022],
}


async def without_end_and_long(row, say):
    """Answer each turn with more text than tokens of an answer may hold."""
    said = await say()
    while said.end != "budget":
        said = await say("x" * 1000)
    return float(said.turn)


async def stops_its_parent(row, say):
    """Stop the process that ends what this one starts."""
    await say()
    if row["prompt"] == "bad":
        os.kill(os.getppid(), signal.SIGSTOP)
        time.sleep(60)  # noqa: ASYNC251  as above
    return 1.0
