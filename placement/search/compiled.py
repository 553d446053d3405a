"""How the inner loops are compiled: by numba, once per machine and version of this folder, kept beside the source."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from hashlib import sha256
from pathlib import Path
from typing import TypeVar, cast

import numba
import numpy as np
from numba import njit
from numba.cpython.unsafe.numbers import trailing_zeros
from numpy.typing import NDArray

Function = TypeVar("Function", bound=Callable[..., object])


def _keep_by_version(folder: Path) -> None:
    """Numba looks only whether a function's own file has changed, not those of the functions that are compiled into it.

    Where the folder cannot be written to, numba finds a place of its own; NUMBA_CACHE_DIR is left as it is.
    """
    sources = b"".join(file.read_bytes() for file in sorted(folder.rglob("*.py")))
    if not numba.config.CACHE_DIR and os.access(folder, os.W_OK):
        numba.config.CACHE_DIR = str(folder / "__pycache__" / f"compiled-{sha256(sources).hexdigest()[:16]}")


_keep_by_version(Path(__file__).parent)


def is_compiled() -> bool:
    """Whether an earlier process has left the compiled code of all of this on disk."""
    return any(Path(numba.config.CACHE_DIR or "").glob("*/deepening.advance-*.nbi"))


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
