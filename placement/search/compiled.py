"""How the inner loops are compiled: by numba, once per machine (the result is kept beside the source)."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar, cast

from numba import njit
from numba.cpython.unsafe.numbers import trailing_zeros

Function = TypeVar("Function", bound=Callable[..., object])


def compiled(function: Function) -> Function:
    """`function`, compiled at its first call and loaded from disk ever after."""
    return cast(Function, njit(cache=True, _nrt=False)(function))


@compiled
def lowest(word: int) -> int:
    """The smallest member of a non-empty set.

    >>> lowest(0b10100)
    2
    """
    return trailing_zeros(word)  # type: ignore[no-any-return]  # an intrinsic of the compiler has no types
