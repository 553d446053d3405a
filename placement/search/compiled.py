"""Compiles the inner loops with numba, once per machine and version of this folder; defines their arrays and sets.

A set of nodes or calls is a single integer of bits.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from hashlib import sha256
from pathlib import Path
from typing import Any, TypeVar, cast

import numba
import numpy as np
from numba import njit, types
from numba.cpython.unsafe.numbers import trailing_zeros
from numpy.typing import NDArray

from prefect_rlhf.placement.search.part import PartCompiler

Ints = NDArray[np.int64]
LOGGER = logging.getLogger(__name__)
Function = TypeVar("Function", bound=Callable[..., object])


def _keep_by_version(folder: Path) -> None:
    """Let numba keep compiled code in a folder named by a hash of all files of `folder`.

    It is in NUMBA_CACHE_DIR if that is set, else next to the source, or in the home folder if the source is not
    writable. Without the hash, numba notices changes of a function's own file, but not of the functions inside it.
    """
    sources = b"".join(file.read_bytes() for file in sorted(folder.rglob("*.py")))
    beside = folder / "__pycache__" if os.access(folder, os.W_OK) else Path("~/.cache/prefect-rlhf/search").expanduser()
    name = f"compiled-{sha256(sources).hexdigest()[:16]}"
    numba.config.CACHE_DIR = str(Path(numba.config.CACHE_DIR or beside) / name)


_keep_by_version(Path(__file__).parent)


def is_compiled() -> bool:
    """Whether an earlier process has left the compiled code of the search on disk."""
    return any(Path(numba.config.CACHE_DIR).glob("*/deepening.advance-*.nbi"))


@cache
def announce_compilation() -> None:
    """Log, once per process, that the search must be compiled first, if that is the case."""
    if not is_compiled():
        LOGGER.warning("Compiling the search for the first time here, which takes about half a minute and is kept.")


def compiled(function: Function) -> Function:
    """Compile `function` at its first call; later processes load it from disk."""
    return _compile(function, cache=True)


def inner(function: Function) -> Function:
    """Compile a function as a part of the compiled functions that call it.

    Calling such a function from Python ends the process.
    """
    return _compile(function, cache=False, no_cpython_wrapper=True, pipeline_class=PartCompiler)


def _compile(function: Function, **options: Any) -> Function:
    dispatcher = njit(_nrt=False, error_model="numpy", no_cfunc_wrapper=True, **options)(function)
    for_types = dispatcher.get_call_template

    def for_any_value(kinds: Sequence[Any], keywords: Mapping[str, Any]) -> Any:
        return for_types([types.unliteral(kind) for kind in kinds], keywords)

    # Otherwise numba compiles a function once more for each constant with which another compiled function calls it.
    dispatcher.get_call_template = for_any_value
    return cast(Function, dispatcher)


@compiled
def lowest(word: int) -> int:
    """The smallest member of a non-empty set.

    >>> lowest(0b10100)
    2
    """
    return trailing_zeros(word)


def word(members: Sequence[bool]) -> int:
    """A set as an integer of bits.

    >>> word([True, False, True])
    5
    """
    return sum(1 << index for index, member in enumerate(members) if member)


def starts(lengths: Sequence[int]) -> Ints:
    """The start of each part if all parts are stored consecutively, and the end of the last.

    >>> starts([2, 3])
    array([0, 2, 5])
    """
    return np.array([0, *np.cumsum(lengths, dtype=np.int64)], dtype=np.int64)
