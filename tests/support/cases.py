"""Cases of parametrized tests and examples of Hypothesis: `make test` runs some, `make test-all` runs all."""

import os
from collections.abc import Iterable, Sequence
from itertools import product
from typing import Any

import pytest

ALL_EXAMPLES = "ALL_EXAMPLES"
"""Environment variable that `make test-all` sets."""


def examples(count: int) -> int:
    """Return the number of examples to draw: `count` in `make test-all`, otherwise a third of them."""
    return count if os.environ.get(ALL_EXAMPLES) else -(-count // 3)


def first(count: int, cases: Iterable[Any]) -> list[Any]:
    """Mark all cases except the first `count` with `all`. A tuple has the values of several parameters.

    >>> [[mark.name for mark in case.marks] for case in first(1, ["a", ("b", 2)])]
    [[], ['all']]
    """
    tuples = [case if isinstance(case, tuple) else (case,) for case in cases]
    return [pytest.param(*case, marks=pytest.mark.all if place >= count else ()) for place, case in enumerate(tuples)]


def combinations(*axes: Iterable[Any], briefly: Sequence[tuple[Any, ...]]) -> list[Any]:
    """Return all combinations of the values, with the mark `all` on those that are not in `briefly`.

    >>> [[mark.name for mark in case.marks] for case in combinations("ab", (1, 2), briefly=[("a", 2)])]
    [['all'], [], ['all'], ['all']]
    """
    found = list(product(*axes))
    assert set(briefly) <= set(found), set(briefly) - set(found)
    return [pytest.param(*case, marks=() if case in briefly else pytest.mark.all) for case in found]
