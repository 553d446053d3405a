"""Names of process groups that only their members make: the same on every member, whatever else it made before."""

from __future__ import annotations

from collections import Counter
from hashlib import sha1

import torch.distributed as dist


def name_groups_by_members() -> None:
    """Name a new group by its ranks and how often these ranks made one. Idempotent.

    Torch counts all groups that a rank has: ranks of different history would name one group differently, and wait for
    each other forever in `new_group(..., use_local_synchronization=True)`.
    """
    if getattr(dist.distributed_c10d._hash_ranks_to_str, "by_members", False):
        return
    made: Counter[tuple[int, ...]] = Counter()

    def name(ranks: list[int]) -> str:
        made[tuple(ranks)] += 1
        return sha1(f"{ranks}#{made[tuple(ranks)]}".encode()).hexdigest()

    name.by_members = True  # type: ignore[attr-defined]
    dist.distributed_c10d._hash_ranks_to_str = name
