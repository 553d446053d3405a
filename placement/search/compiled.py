"""How the inner loops are compiled: by numba, once per machine (the result is kept beside the source)."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar, cast

from numba import njit
from numba.cpython.unsafe.numbers import trailing_zeros

Function = TypeVar("Function", bound=Callable[..., object])


def compiled(function: Function) -> Function:
    """`function`, compiled at its first call and loaded from disk ever after."""
    return cast(Function, njit(cache=True, _nrt=False, error_model="numpy")(function))


def inner(function: Function) -> Function:
    """As `compiled`, for what only compiled functions call: without the entry from Python, which takes long to compile.

    Calling such a function from Python ends the process.
    """
    return cast(
        Function,
        njit(cache=True, _nrt=False, error_model="numpy", no_cpython_wrapper=True, no_cfunc_wrapper=True)(function),
    )


@compiled
def lowest(word: int) -> int:
    """The smallest member of a non-empty set.

    >>> lowest(0b10100)
    2
    """
    return trailing_zeros(word)
