"""The kinds of arrays that compiled functions read: whole numbers, sets as words of bits, offsets of parts."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.int64]


def word(members: Sequence[bool]) -> int:
    """A set as bits.

    >>> word([True, False, True])
    5
    """
    return sum(1 << index for index, member in enumerate(members) if member)


def starts(lengths: Sequence[int]) -> Ints:
    """Where each part begins when all stand one after another, and where the last ends.

    >>> starts([2, 3])
    array([0, 2, 5])
    """
    return np.array([0, *np.cumsum(lengths, dtype=np.int64)], dtype=np.int64)
