"""Offloads an engine's tensors from device memory to host memory and back.

Tensors keep their identity: storages are emptied and refilled, so views, optimizer references and hooks stay valid. On
a GPU the copies run on a stream of their own, concurrently with other calls' computation. Content that the host already
has, or that is overwritten before its next use, is dropped.
"""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import final

import torch
from torch import Tensor

from prefect_rlhf.engines.weights.memory import release_free_memory
from prefect_rlhf.engines.weights.pinned_memory import PinnedMemory, anonymous_memory
from prefect_rlhf.errors.errors import EngineFailed


@final
class HostLink:
    """Copies tensors to host memory and back.

    On a GPU it has a pinned buffer, which is kept because pinning takes longer than copying, and a side stream. On CPU
    "host memory" is shared memory, so that a process's private memory (RssAnon) counts as its device memory.
    """

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None  # type: ignore[no-untyped-call]  # torch's
        self._pinned: PinnedMemory | None = None

    def room(self, num_bytes: int) -> Tensor:
        """Return a flat buffer in host memory; on a GPU the same buffer each time."""
        if self._stream is None:
            return anonymous_memory(num_bytes)
        if self._pinned is None or len(self._pinned.content) < num_bytes:
            self.close()
            self._pinned = PinnedMemory(num_bytes)
        return self._pinned.content[:num_bytes]

    def close(self) -> None:
        """Unpin the buffer; the next request for room makes another."""
        if self._pinned is not None:
            self._pinned.close()
            self._pinned = None

    @contextmanager
    def copying(self) -> Iterator[None]:
        """Return when the copies made in the body are done.

        They begin after all work that is queued on the device now, because it may still use blocks of memory that the
        allocator reuses. An event of the current stream would not suffice: this may be the thread of the copies, and
        the calls' thread has another current stream once vLLM is built. Work that is queued later runs concurrently.
        """
        if self._stream is None:
            yield
            return
        torch.cuda.synchronize(self._stream.device)
        with torch.cuda.stream(self._stream):
            yield
        self._stream.synchronize()


class HostCopies:
    """Copies of storages in host memory, valid until the storages are written."""

    def __init__(self, link: HostLink) -> None:
        self._link = link
        self._copies: list[tuple[torch.UntypedStorage, Tensor]] | None = None

    @property
    def exist(self) -> bool:
        """Whether the storages were copied since they were last written."""
        return self._copies is not None

    def save(self, tensors: Iterable[Tensor]) -> int:
        """Copy the storages of `tensors` to host memory; return the bytes."""
        storages = _storages(tensors)
        sizes = [storage.nbytes() for storage in storages]
        host = self._link.room(sum(sizes))
        self._copies = list(zip(storages, torch.split(host, sizes), strict=True))
        with self._link.copying():
            for storage, copy in self._copies:
                copy.copy_(_bytes(storage), non_blocking=True)
        return len(host)

    def require(self) -> list[tuple[torch.UntypedStorage, Tensor]]:
        """Return each storage with its copy. Raises EngineFailed if there is no copy."""
        if self._copies is None:
            raise EngineFailed("a reload found no copy in host memory: the tensors were written after the last copy")
        return self._copies

    def load(self) -> int:
        """Copy the content back; return the bytes. Raises EngineFailed if there is no copy."""
        copies = self.require()
        with self._link.copying():
            for storage, copy in copies:
                _bytes(storage).copy_(copy, non_blocking=True)
        return sum(len(copy) for _, copy in copies)

    def forget(self) -> None:
        """Note that the storages were written. On CPU this frees the copies."""
        self._copies = None

    def close(self) -> None:
        """Free the copies."""
        self.forget()
        self._link.close()


@final
class OffloadedTensors:
    """Storages that are emptied and refilled, with copies of their content in host memory.

    `kept` storages come back with their content, or undefined if it is not copied. `constant` storages are never
    written: they are copied to the host once. `scratch` storages come back as zeros.
    """

    def __init__(self, device: torch.device) -> None:
        self._kept, self._constant = HostCopies(HostLink(device)), HostCopies(HostLink(device))
        self._emptied: list[tuple[torch.UntypedStorage, int]] = []
        self._scratch: list[torch.UntypedStorage] = []

    def offload(
        self,
        kept: Sequence[Tensor],
        scratch: Sequence[Tensor] = (),
        constant: Sequence[Tensor] = (),
        copies: bool = True,
    ) -> int:
        """Empty the storages; return the bytes copied to the host. Without `copies`, the host copy stays as it is."""
        if self._emptied:
            return 0
        bytes_copied = self._kept.save(kept) if copies else 0
        if not self._constant.exist:
            bytes_copied += self._constant.save(constant)
        self._scratch = _storages(scratch)
        self._emptied = [(storage, storage.nbytes()) for storage in _storages((*kept, *scratch, *constant))]
        for storage, _ in self._emptied:
            storage.resize_(0)
        # On a GPU the freed blocks stay with torch's allocator, which calls reuse. Returning them to the driver would
        # stop the device under the calls that run meanwhile. vLLM empties the cache when it is built or woken up.
        release_free_memory()
        return bytes_copied

    def reload(self, copies: bool = True) -> int:
        """Refill the storages; return the bytes copied from the host. Without `copies`, `kept` storages are undefined.

        Raises EngineFailed if there is no copy; then the storages stay empty.
        """
        if not self._emptied:
            return 0
        if copies:
            self._kept.require()
        for storage, size in self._emptied:
            storage.resize_(size)
        self._emptied = []
        for storage in self._scratch:
            _bytes(storage).zero_()
        return self._constant.load() + (self._kept.load() if copies else 0)

    def written(self) -> None:
        """Note that `kept` storages were written, so their host copy is outdated."""
        self._kept.forget()

    def close(self) -> None:
        """Free the copies in host memory. The storages stay as they are."""
        self._kept.close()
        self._constant.close()


def empty(tensors: Iterable[Tensor]) -> None:
    """Free the storages behind tensors that no code may read again."""
    for storage in _storages(tensors):
        storage.resize_(0)


def _storages(tensors: Iterable[Tensor]) -> list[torch.UntypedStorage]:
    """Return the distinct storages behind tensors. Many tensors may be views of the same flat buffer."""
    return list({tensor.untyped_storage()._cdata: tensor.untyped_storage() for tensor in tensors}.values())


def _bytes(storage: torch.UntypedStorage) -> Tensor:
    """View the storage as a flat tensor of bytes."""
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
