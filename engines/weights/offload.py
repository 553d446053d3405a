"""Offload of an engine's tensors: from device memory to host memory and back.

Tensors keep their identity: storages are emptied and refilled, so views, optimizer references and hooks stay valid. On
a GPU the copies run on a stream of their own, concurrently with other calls' computation.
"""

import mmap
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import final

import torch
from torch import Tensor

from prefect_rlhf.engines.weights.memory import release_free_memory


@final
class HostLink:
    """The copies of some tensors to host memory and back.

    On a GPU: a pinned buffer, which is kept since pinning takes longer than copying, and a side stream. On CPU "host
    memory" is shared memory, so that a process's private memory (RssAnon) counts as its device memory.
    """

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None  # type: ignore[no-untyped-call]  # torch's
        self._pinned: Tensor | None = None

    def room(self, num_bytes: int) -> Tensor:
        """Return a flat buffer in host memory; on a GPU the same buffer each time."""
        if self._stream is None:
            return _shared(num_bytes)
        if self._pinned is None or len(self._pinned) < num_bytes:
            self._pinned = torch.empty(num_bytes, dtype=torch.uint8, pin_memory=True)
        return self._pinned[:num_bytes]

    @contextmanager
    def copying(self) -> Iterator[None]:
        """End when the copies made within are done.

        They begin after all work that is queued on the device now, since it may still use blocks of memory that the
        allocator reuses. An event of the current stream would not do: this may be the thread of the copies, and the
        calls' thread has another current stream once vLLM is built. Work that is queued later runs meanwhile.
        """
        if self._stream is None:
            yield
            return
        torch.cuda.synchronize(self._stream.device)
        with torch.cuda.stream(self._stream):
            yield
        self._stream.synchronize()


class OffloadedTensors:
    """Storages that were emptied, with copies of their content; `scratch` storages are restored as zeros."""

    def __init__(self, kept: Iterable[Tensor], scratch: Iterable[Tensor] = (), link: HostLink | None = None) -> None:
        storages = _storages(kept)
        self._scratch = [(storage, storage.nbytes()) for storage in _storages(scratch)]
        self._link = link or HostLink(storages[0].device if storages else torch.device("cpu"))
        host = self._link.room(sum(storage.nbytes() for storage in storages))
        self._kept = list(zip(storages, torch.split(host, [s.nbytes() for s in storages]), strict=True))
        self.num_bytes = len(host) + sum(size for _, size in self._scratch)
        with self._link.copying():
            for storage, copy in self._kept:
                copy.copy_(_bytes(storage), non_blocking=True)
        for storage, _ in (*self._kept, *self._scratch):
            storage.resize_(0)
        # On a GPU the freed blocks stay with torch's allocator, which calls reuse. Returning them to the driver would
        # stop the device under the calls that run meanwhile. vLLM empties the cache when it is built or woken up.
        release_free_memory()

    def restore(self) -> int:
        """Refill every storage; return the bytes."""
        for storage, copy in self._kept:
            storage.resize_(len(copy))
        for storage, size in self._scratch:
            storage.resize_(size)
        with self._link.copying():
            for storage, copy in self._kept:
                _bytes(storage).copy_(copy, non_blocking=True)
            for storage, _ in self._scratch:
                _bytes(storage).zero_()
        return self.num_bytes


def _storages(tensors: Iterable[Tensor]) -> list[torch.UntypedStorage]:
    """Return the distinct storages behind tensors. Many tensors may be views of the same flat buffer."""
    return list({tensor.untyped_storage()._cdata: tensor.untyped_storage() for tensor in tensors}.values())


def _shared(num_bytes: int) -> Tensor:
    """Return memory that counts as shared; it has no name, so it ends with the process."""
    if num_bytes == 0:
        return torch.empty(0, dtype=torch.uint8)
    return torch.frombuffer(mmap.mmap(-1, num_bytes), dtype=torch.uint8)


def _bytes(storage: torch.UntypedStorage) -> Tensor:
    """View the storage as a flat tensor of bytes."""
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
