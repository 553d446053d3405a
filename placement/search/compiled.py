"""Compilation of the inner loops by numba, once per machine and version of this folder; the arrays and sets they read.

A set of nodes or calls is a single word of bits.
"""

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

Ints = NDArray[np.int64]
Function = TypeVar("Function", bound=Callable[..., object])


def _keep_by_version(folder: Path) -> None:
    """Let numba keep compiled code next to the source, in a folder named by a hash of all files of `folder`.

    Without this, numba notices changes of a function's own file, but not of the functions that are compiled into it. If
    the folder is not writable, numba chooses a folder itself; NUMBA_CACHE_DIR is not changed.
    """
    sources = b"".join(file.read_bytes() for file in sorted(folder.rglob("*.py")))
    if not numba.config.CACHE_DIR and os.access(folder, os.W_OK):
        numba.config.CACHE_DIR = str(folder / "__pycache__" / f"compiled-{sha256(sources).hexdigest()[:16]}")


_keep_by_version(Path(__file__).parent)


def is_compiled() -> bool:
    """Whether an earlier process has left the compiled code of the search on disk."""
    return any(Path(numba.config.CACHE_DIR or "").glob("*/deepening.advance-*.nbi"))


def compiled(function: Function) -> Function:
    """Compile `function` at its first call; later processes load it from disk."""
    return cast(Function, njit(cache=True, _nrt=False, error_model="numpy")(function))


def inner(function: Function) -> Function:
    """Compile a function that only compiled functions call: without the entry from Python, which takes long to compile.

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


def word(members: Sequence[bool]) -> int:
    """A set as bits.

    >>> word([True, False, True])
    5
    """
    return sum(1 << index for index, member in enumerate(members) if member)


def starts(lengths: Sequence[int]) -> Ints:
    """The start of each part if all are stored consecutively, and the end of the last.

    >>> starts([2, 3])
    array([0, 2, 5])
    """
    return np.array([0, *np.cumsum(lengths, dtype=np.int64)], dtype=np.int64)
