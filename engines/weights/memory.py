"""Bytes in a rank's memory: storages of tensors, and the system's view of the process as their witness."""

import ctypes
import subprocess
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


APPS = ("nvidia-smi", "--query-compute-apps=gpu_uuid,pid,process_name,used_memory", "--format=csv,noheader")


def device_holders(uuid: str) -> str:
    """Return the processes on the GPU `uuid` with their memory, as the driver's tool lists them; empty without it."""
    try:
        answer = subprocess.run(APPS, capture_output=True, text=True, check=False, timeout=30)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    rows = [row.split(", ") for row in answer.stdout.splitlines() if uuid in row]
    return "; ".join(f"pid {pid} {name} {memory}" for _, pid, name, memory in (row for row in rows if len(row) == 4))


def release_free_memory() -> None:
    """Give freed memory back to the system: glibc keeps freed blocks of less than 32 MB otherwise."""
    ctypes.CDLL("libc.so.6").malloc_trim(0)
