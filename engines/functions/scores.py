"""The results of host functions on rows: values by function, and the rows that failed."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

MOST_SCORE = 1e9
"""Largest size of a score, of a turn's reward, of their sums, and of `failed_value`.

float32 holds the squares of such numbers and their sums over a step, so statistics of groups cannot overflow.
"""
MOST_NUMBER = 1e30
"""Largest size of another number that a function returns; a larger one is left out, as infinity is."""
SCORES = f"a number from {-MOST_SCORE:g} to {MOST_SCORE:g}"
"""What a score may be, in messages."""


@dataclass(frozen=True, slots=True)
class RowFailure:
    """A function that failed on a row: the row's index among the scored rows, and the reason of the last failure."""

    row: int
    function: str
    reason: str


@dataclass(frozen=True, slots=True)
class HostScores:
    """Values `values[function name][row]`, in the order of the rows.

    None: the function does not apply to the row. NaN: it failed, and the row gets weight 0. `metrics` has the means of
    the other numbers that functions returned, under `function name/number's name`. `seconds` is wall time.
    """

    values: Mapping[str, tuple[float | None, ...]]
    failures: tuple[RowFailure, ...]
    seconds: float
    metrics: Mapping[str, float]


@dataclass(frozen=True, slots=True)
class Verdict:
    """The result of a call for one row: a value or the reason of its failure, and other numbers by name.

    `held_up`: it missed its deadline because another call blocked its event loop.
    """

    value: float | None = None
    failed: str = ""
    held_up: bool = False
    metrics: Mapping[str, float] = field(default_factory=dict)


def mean(numbers: list[float]) -> float:
    """Return the mean, which does not depend on the order.

    >>> mean([1.0, 2.0])
    1.5
    """
    return math.fsum(numbers) / len(numbers)
