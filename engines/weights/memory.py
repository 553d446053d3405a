"""Measures a rank's memory: storages of tensors, and the counts of the system and of the driver for comparison."""

import ctypes
import subprocess
from collections.abc import Iterable
from pathlib import Path

import torch
from torch import Tensor

from prefect_rlhf.engines.commands import GpuMemory


def storage_bytes(tensors: Iterable[Tensor]) -> int:
    """Bytes of the storages behind `tensors`, each counted once however many views it has.

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


def gpu_memory() -> GpuMemory | None:
    """Return the memory of this process's GPU and restart the count of its peak; None on CPU.

    The driver reports no maximum. Outside of torch, memory changes only when engines are built, so the peak is the
    current use plus what torch held beyond its current share.
    """
    if not torch.cuda.is_available():
        return None
    free, total = torch.cuda.mem_get_info()
    allocated, reserved = torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved()
    used = total - free + reserved - torch.cuda.memory_reserved()
    torch.cuda.reset_peak_memory_stats()
    return GpuMemory(allocated, reserved, used, free)


def limit_torch(num_bytes: int) -> None:
    """Let torch reserve at most `num_bytes` of this process's GPU.

    At the limit, torch returns unused blocks to the driver and tries again, then raises its own error. Without a limit,
    its blocks could fill the device, and NCCL's next allocation would fail.
    """
    total: int = torch.cuda.mem_get_info()[1]
    torch.cuda.set_per_process_memory_fraction(min(1.0, num_bytes / total))


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
    """Return freed memory to the system, because glibc keeps freed blocks of less than 32 MB."""
    ctypes.CDLL("libc.so.6").malloc_trim(0)
