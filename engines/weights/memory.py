"""Bytes in a rank's memory: storages of tensors, and the system's view of the process as their witness."""

import ctypes
from collections.abc import Iterable
from pathlib import Path

from torch import Tensor


def storage_bytes(tensors: Iterable[Tensor]) -> int:
    """Bytes of the storages behind `tensors`, each counted once for any number of views.

    >>> import torch
    >>> weight = torch.zeros(4, 4)
    >>> storage_bytes([weight, weight[0], weight.t()])
    64
    """
    storages = {t.untyped_storage()._cdata: t.untyped_storage() for t in tensors}
    return sum(storage.nbytes() for storage in storages.values())


def resident_bytes() -> int:
    """Anonymous memory of this process that is in RAM; pages of files and shared memory do not count."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("RssAnon:"):
            return int(line.split()[1]) * 1024
    return 0


def release_free_memory() -> None:
    """Give freed memory back to the system: glibc keeps freed blocks of less than 32 MB otherwise."""
    ctypes.CDLL("libc.so.6").malloc_trim(0)
