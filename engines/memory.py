"""What a rank's memory holds: storage bytes of tensors, and the process's own view as their witness."""

from __future__ import annotations

import ctypes
from collections.abc import Iterable
from pathlib import Path

import torch
from torch import Tensor

_M_MMAP_THRESHOLD = -3  # of glibc's malloc.h


def storage_bytes(tensors: Iterable[Tensor]) -> int:
    """Bytes of the storages behind `tensors`, each counted once whatever views it has.

    >>> weight = torch.zeros(4, 4)
    >>> storage_bytes([weight, weight[0], weight.t()])
    64
    """
    return sum(storage.nbytes() for storage in unique_storages(tensors))


def unique_storages(tensors: Iterable[Tensor]) -> list[torch.UntypedStorage]:
    """The storages behind `tensors`, each once."""
    return list({t.untyped_storage()._cdata: t.untyped_storage() for t in tensors}.values())


def resident_bytes() -> int:
    """Anonymous memory of this process that is in RAM; pages of files and shared memory do not count."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("RssAnon:"):
            return int(line.split()[1]) * 1024
    return 0


def release_free_memory() -> None:
    """Give freed memory back to the system: glibc keeps freed blocks of less than 32 MB otherwise."""
    _libc().malloc_trim(0)


def return_large_blocks_at_once(threshold_bytes: int = 1 << 20) -> None:
    """From now on, freed blocks of at least `threshold_bytes` go back to the system when they are freed."""
    _libc().mallopt(_M_MMAP_THRESHOLD, threshold_bytes)


def _libc() -> ctypes.CDLL:
    return ctypes.CDLL("libc.so.6")
