"""Pinned host memory of exactly the bytes that a certificate counts: an anonymous map that CUDA registers.

Torch's own pinned memory comes in powers of two, so it takes up to twice its size.
"""

import mmap
import weakref
from typing import Any, final

import torch
from torch import Tensor

from prefect_rlhf.errors.errors import OutOfDeviceMemory
from prefect_rlhf.placement.memory.bytes import byte_size

_PORTABLE = 1  # cudaHostRegisterPortable: pinned for every context of the process


def anonymous_memory(num_bytes: int) -> Tensor:
    """Return `num_bytes` bytes of host memory as a flat tensor; it has no name, so it ends with the process.

    It counts as shared, so a forked process cannot turn pinned pages into copies. Raises OutOfDeviceMemory.
    """
    if num_bytes == 0:
        return torch.empty(0, dtype=torch.uint8)
    try:
        return torch.frombuffer(mmap.mmap(-1, num_bytes), dtype=torch.uint8)
    except OSError as error:
        raise OutOfDeviceMemory(f"the host has no {byte_size(num_bytes)} left: {error}") from error


@final
class PinnedMemory:
    """A flat tensor `content` in pinned memory, pinned until `close` or until the object is collected.

    Raises OutOfDeviceMemory if the host cannot pin as much. Not yet run on a GPU.
    """

    def __init__(self, num_bytes: int) -> None:
        self.content = anonymous_memory(num_bytes)
        runtime: Any = torch.cuda.cudart()  # type: ignore[no-untyped-call]  # torch's
        if num_bytes:
            status = int(runtime.cudaHostRegister(self.content.data_ptr(), num_bytes, _PORTABLE))
            if status:
                raise OutOfDeviceMemory(f"the host cannot pin {byte_size(num_bytes)}: CUDA error {status}")
        self._release = weakref.finalize(self, _unregister, runtime, self.content)
        self._release.atexit = False  # the driver unpins the memory of a process that ends

    def close(self) -> None:
        """Unpin the memory; a second call does nothing. The tensor stays valid."""
        self._release()


def _unregister(runtime: Any, content: Tensor) -> None:
    if len(content):
        runtime.cudaHostUnregister(content.data_ptr())
