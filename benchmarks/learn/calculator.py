"""Tasks that need a calculator, and the play that is the calculator.

The prompt shows a call and its result for a product. Most tasks are stories, in which the model must find the numbers
and the operation. No pair of numbers is both in training and held out.
"""

from __future__ import annotations

import operator
import random
import re
from collections.abc import Callable, Mapping
from typing import Any

NUM_TRAIN, NUM_HELD_OUT = 960, 60
SHOWN = (
    {"role": "system", "content": "Use the calculator."},
    {"role": "user", "content": "What is 12 times 34?"},
    {"role": "assistant", "content": "<calc>12*34</calc><result>408</result> The answer is 408."},
)
OPERATIONS: Mapping[str, Callable[[int, int], int]] = {"+": operator.add, "-": operator.sub, "*": operator.mul}
WAYS = (
    ("*", "What is {a} times {b}?"),
    ("*", "A box holds {a} nails. How many nails do {b} boxes hold?"),
    ("*", "A ticket costs {b} euros. How much do {a} tickets cost?"),
    ("*", "A hall has {b} rows of {a} chairs. How many chairs are there?"),
    ("-", "What is {a} minus {b}?"),
    ("-", "A farm has {a} hens and sells {b}. How many hens are left?"),
    ("-", "Of {a} pages, {b} are read. How many pages are not read?"),
    ("+", "Ann has {a} stamps and Tom has {b}. How many do they have together?"),
    ("+", "A shop sold {a} pens and then {b} more. How many did it sell?"),
    ("+", "A road of {a} metres gets {b} metres longer. How long is it now?"),
)
"""The operation and the text of tasks."""
CALL = re.compile(r"<calc>\s*(\d{1,9})\s*([-+*])\s*(\d{1,9})\s*</calc>")
"""A call. The token that completes the stop string may continue past it, so a call need not end a turn."""
_NUMBER = re.compile(r"-?\d+")


def tasks(seed: int = 0) -> dict[str, list[Any]]:
    """Return the columns of all tasks: `prompt` (a chat), `answer` and `split`."""
    dice = random.Random(seed)
    pairs = dice.sample([(a, b) for a in range(1001, 9999, 7) for b in range(101, 999, 6)], NUM_TRAIN + NUM_HELD_OUT)
    asked = [(*WAYS[number % len(WAYS)], *pair) for number, pair in enumerate(pairs)]
    return {
        "prompt": [[*SHOWN, {"role": "user", "content": way.format(a=a, b=b)}] for _, way, a, b in asked],
        "answer": [OPERATIONS[sign](a, b) for sign, _, a, b in asked],
        "split": ["train"] * NUM_TRAIN + ["held_out"] * NUM_HELD_OUT,
    }


async def solve(row: Mapping[str, Any], say: Any) -> dict[str, float]:
    """Run the model's calls; a task is solved if the last number of the last turn is the answer."""
    said = await say()
    while call := CALL.search(said.text):
        left, sign, right = call.groups()
        said = await say(f"<result>{OPERATIONS[sign](int(left), int(right))}</result>")
    solved = float(last_number(said.text) == row["answer"])
    return {"score": solved, "solved": solved}


def last_number(text: str) -> int | None:
    """Return the last whole number of a text.

    >>> last_number("So 7 + 5 is 1,012."), last_number("Many")
    (1012, None)
    """
    numbers = _NUMBER.findall(text.replace(",", ""))
    return int(numbers[-1]) if numbers else None
