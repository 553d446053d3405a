"""The results of host functions on rows: values by function, and the rows that failed."""

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Literal

from prefect_rlhf.engines.functions.message import Message
from prefect_rlhf.errors.in_short import in_short

MOST_SCORE = 1e9
"""Largest size of a score, of a turn's reward, of their sums, and of `failed_value`.

float32 holds the squares of such numbers and their sums over a step, so statistics of groups cannot overflow.
"""
MOST_NUMBER = 1e30
"""Largest size of another number. A reward's larger number is left out, as infinity is; a play's fails its row."""
MOST_NUMBERS = 64
"""Other numbers of a row."""
LONGEST_NAME = 100
"""Longest name of another number, in characters."""
SCORES = f"a number from {-MOST_SCORE:g} to {MOST_SCORE:g}"
"""How messages say which scores are allowed."""

Blame = Literal["response", "code", "row", "result"]
"""The cause of a failure: the response; or a mistake in the code, or a key that rows lack, with every response.
`result` means that the function returned something other than a number, or named a number as no metrics can, which it
may do for some responses only."""


@dataclass(frozen=True, slots=True)
class RowFailure:
    """A row on which a function failed: the index among the scored rows, and the reason of the last failure.

    For `blame` see `blame_of`.
    """

    row: int
    function: str
    reason: str
    blame: Blame = "response"


@dataclass(frozen=True, slots=True)
class HostScores:
    """Values `values[function name][row]`, in the order of the rows.

    None means that the function does not apply to the row; NaN means that it failed, and the row gets weight 0.
    `metrics` has the means of other numbers that functions returned, under `function name/number's name`. `seconds` is
    wall time. `answers` has each row's answer, or None.
    """

    values: Mapping[str, tuple[float | None, ...]]
    failures: tuple[RowFailure, ...]
    seconds: float
    metrics: Mapping[str, float]
    answers: tuple[str | None, ...] = ()


@dataclass(frozen=True, slots=True)
class Verdict(Message):
    """A call's result for a row: a value or the reason of its failure, and other numbers by name."""

    value: float | None = None
    failed: str = ""
    held_up: bool = False
    """Whether it missed its deadline because another call blocked its event loop."""
    metrics: Mapping[str, float] = field(default_factory=dict)
    blame: Blame = "response"
    """See `blame_of`."""
    answer: str | None = None
    """The response's answer according to the function."""


def wrong_names(names: Collection[str]) -> str:
    """Return a complaint about the names of a row's other numbers; empty if they are valid.

    >>> wrong_names(["words"]), wrong_names(["two\\nlines"])
    ('', "a number named 'two\\\\nlines', expected a name of 1 to 100 printable characters")
    """
    if len(names) > MOST_NUMBERS:
        return f"{len(names)} numbers besides the score, with {in_short([*names][-1])}, expected at most {MOST_NUMBERS}"
    wrong = [name for name in names if not 1 <= len(name) <= LONGEST_NAME or not name.isprintable()]
    expected = f"a name of 1 to {LONGEST_NAME} printable characters"
    return f"a number named {in_short(wrong[0])}, expected {expected}" if wrong else ""


def mean(numbers: list[float]) -> float:
    """Return the mean, independent of the numbers' order.

    >>> mean([1.0, 2.0])
    1.5
    """
    return math.fsum(numbers) / len(numbers)
