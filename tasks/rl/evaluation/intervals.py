"""Intervals of means over prompts by bootstrap, which draws the prompts again and again with replacement.

A prompt is drawn with all its samples, because these are alike (Efron & Tibshirani 1993, chapter 13: the percentile
interval). The draws depend only on a fixed seed and the number of prompts, so the same rows have the same interval
under every plan. With few prompts, or equal values, an interval is too narrow, because these rows do not show how
others would differ.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

DRAWS = 2000
SHARE = 0.95  # of such intervals that hold the true mean
SEED = 20211
AT_ONCE = 1 << 20  # drawn prompts in memory
KEPT = 2048  # prompts whose draws stay in memory for the next metric, 16 MiB
MANY = 10_000  # prompts; the mean of more is as good as normal, and draws would take seconds
NORMAL = 1.959964  # standard errors on either side of a mean that hold 95%


@dataclass(frozen=True, slots=True)
class Interval:
    """A mean over prompts, and its 95% interval."""

    mean: float
    low: float
    high: float

    @property
    def as_difference(self) -> str:
        """Format as a difference of two means, with signs.

        >>> Interval(0.04, 0.01, 0.07).as_difference
        '+0.04, 95%: +0.01 to +0.07'
        """
        return f"{self.mean:+.3g}, 95%: {self.low:+.3g} to {self.high:+.3g}"


def interval(values_P: NDArray[np.float64]) -> Interval | None:
    """Return the mean of the values that are numbers, with its interval; None if no value is.

    With more than 10,000 values, this is the normal interval instead.

    >>> interval(np.array([1.0, 1.0, np.nan]))
    Interval(mean=1.0, low=1.0, high=1.0)
    """
    known_P = np.asarray(values_P, dtype=np.float64)
    known_P = known_P[np.isfinite(known_P)]
    if not len(known_P):
        return None
    if len(known_P) > MANY:
        mean, around = float(known_P.mean()), NORMAL * float(known_P.std(ddof=1)) / len(known_P) ** 0.5
        return Interval(mean, mean - around, mean + around)
    draws = _kept_draws(len(known_P)) if len(known_P) <= KEPT else _draws(len(known_P))
    means = np.concatenate([known_P.take(drawn).mean(1) for drawn in draws])
    low, high = np.quantile(means, [(1 - SHARE) / 2, (1 + SHARE) / 2])
    return Interval(float(known_P.mean()), float(low), float(high))


@lru_cache(maxsize=1)
def _kept_draws(prompts: int) -> tuple[NDArray[np.int32], ...]:
    """Return the draws; the metrics of a set have them in common."""
    return tuple(_draws(prompts))


def _draws(prompts: int) -> Iterator[NDArray[np.int32]]:
    """Yield the numbers of the drawn prompts, [D, P], for D of all draws at a time."""
    random = np.random.default_rng((SEED, prompts))
    at_once = max(1, AT_ONCE // prompts)
    for first in range(0, DRAWS, at_once):
        yield random.integers(0, prompts, (min(at_once, DRAWS - first), prompts), dtype=np.int32)
