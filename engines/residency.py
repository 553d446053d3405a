"""Device memory of an engine's tensors: how much they hold, moving it to host memory and back.

Tensors keep their identity: storages are emptied and refilled, so views, optimizer references and hooks stay valid.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from prefect_rlhf.engines.memory import release_free_memory


class Parked:
    """Storages that were emptied, with what they held; those of `scratch` come back as zeros."""

    def __init__(self, kept: Iterable[Tensor], scratch: Iterable[Tensor] = ()) -> None:
        self._kept = [(storage, _to_host(storage)) for storage in _storages(kept)]
        self._scratch = [(storage, storage.nbytes()) for storage in _storages(scratch)]
        self.num_bytes = sum(size for _, size in self._sizes())
        for storage, _ in self._sizes():
            storage.resize_(0)
        _return_freed_memory()

    def restore(self) -> int:
        """Refill every storage; return the bytes."""
        for storage, size in self._sizes():
            storage.resize_(size)
        for storage, copy in self._kept:
            storage.copy_(copy)
        for storage, _ in self._scratch:
            _bytes(storage).zero_()
        return self.num_bytes

    def _sizes(self) -> list[tuple[torch.UntypedStorage, int]]:
        return [(storage, copy.nbytes()) for storage, copy in self._kept] + self._scratch


def _storages(tensors: Iterable[Tensor]) -> list[torch.UntypedStorage]:
    """The distinct storages behind tensors, many of which may be views of one flat buffer."""
    return list({tensor.untyped_storage()._cdata: tensor.untyped_storage() for tensor in tensors}.values())


def _to_host(storage: torch.UntypedStorage) -> torch.UntypedStorage:
    """A copy in host memory, pinned where the device is a GPU, so that the link runs at full speed."""
    pinned = storage.device.type == "cuda"
    copy = torch.empty(storage.nbytes(), dtype=torch.uint8, pin_memory=pinned).untyped_storage()
    return copy.copy_(storage)


def _bytes(storage: torch.UntypedStorage) -> Tensor:
    """The storage as a flat tensor of bytes."""
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


def _return_freed_memory() -> None:
    """Give freed blocks back to the driver and the system, so that other processes can have them."""
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    release_free_memory()
