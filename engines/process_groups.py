"""Process groups made only by their members: a world for them, and a group name that is equal on every member."""

from collections import Counter
from collections.abc import Iterable, Sequence
from datetime import timedelta
from hashlib import sha1
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import HashStore

Shared = TypeVar("Shared")


def ensure_world() -> None:
    """Make a world of a single rank, without network, if the process has no world, because Megatron and vLLM need
    it.
    """
    if not dist.is_initialized():
        backend = "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo"
        dist.init_process_group(backend, store=HashStore(), rank=0, world_size=1)


def name_groups_by_members() -> None:
    """Make torch name a new group by its ranks and by how many groups these ranks have made. Idempotent.

    Torch counts all groups of a rank. Ranks with different histories would name the same group differently, and wait
    for each other forever in `new_group(..., use_local_synchronization=True)`.
    """
    if getattr(dist.distributed_c10d._hash_ranks_to_str, "by_members", False):
        return
    num_groups: Counter[tuple[int, ...]] = Counter()

    def name(ranks: list[int]) -> str:
        num_groups[tuple(ranks)] += 1
        return sha1(f"{ranks}#{num_groups[tuple(ranks)]}".encode()).hexdigest()

    name.by_members = True  # type: ignore[attr-defined]
    dist.distributed_c10d._hash_ranks_to_str = name


def world_limit() -> timedelta:
    """Return the time limit of the world's collectives, which also holds for every group in it."""
    world = dist.group.WORLD
    assert world is not None  # after `ensure_world`
    backend = world._get_backend(torch.device("cpu"))
    limit: timedelta = getattr(getattr(backend, "options", None), "_timeout", dist.default_pg_timeout)
    return limit


def uses_nccl(tensor: Tensor) -> bool:
    """Whether NCCL sends this tensor; gloo sends tensors in host memory."""
    return tensor.is_cuda


def shared(values: Sequence[Shared] | None, group: dist.ProcessGroup) -> Sequence[Shared]:
    """Return the values of the group's first rank on every rank of the group; the other ranks pass None."""
    if group.size() == 1:
        return values or ()
    carried = [values]
    dist.broadcast_object_list(carried, group=group, group_src=0)
    return carried[0] or ()


def open_communicators(groups: Iterable[dist.ProcessGroup]) -> None:
    """Make NCCL create the communicators of `groups` now; every member must call this, with its groups in the same
    order.

    NCCL creates a communicator at its first use. In the middle of a step, its buffers would not fit beside torch's
    cached blocks, and a first use by only some members is undefined. A no-op without GPUs.
    """
    if not torch.cuda.is_available():
        return
    for group in groups:
        dist.all_reduce(torch.zeros(1, device="cuda"), group=group)
    torch.cuda.synchronize()
