"""Regions of a shard as views into its engine's own storage, and direct copies between such views.

A block is a view with the same number of axes as its parameter. A shard is a block, or several if its engine fuses it
with others (a query weight between keys and values); their rows, block after block, are the shard's rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from prefect_rlhf.engines.engine import Shard
from prefect_rlhf.placement.layout.regions import Region

if TYPE_CHECKING:
    from torch import Tensor


def within(region: Region, outer: Region) -> tuple[slice, ...]:
    """Return `region` as slices of a tensor that holds `outer`.

    >>> within(((4, 6), (0, 8)), ((4, 8), (0, 8)))
    (slice(0, 2, None), slice(0, 8, None))
    """
    axes = zip(region, outer, strict=True)
    return tuple(slice(start - first, stop - first) for (start, stop), (first, _) in axes)


def blocks(shard: Shard, region: Region) -> list[Tensor]:
    """Return the blocks of a region that lies within the shard's.

    Raises ValueError for a view that splits more than the first axis of its parameter in two.
    """
    rows, *columns = within(region, shard.region)
    view = shard.view
    if view.shape == shard.shape:
        return [view[rows, *columns]]
    if view.dim() != len(shard.region) + 1 or view.shape[2:] != shard.shape[1:]:
        raise ValueError(f"a view of shape {tuple(view.shape)} is not made of blocks of rows of {shard.shape}")
    size = view.shape[1]
    groups = range(rows.start // size, -(-rows.stop // size))
    return [view[g][max(rows.start - g * size, 0) : rows.stop - g * size, *columns] for g in groups]


def copy_rows(sources: Sequence[Tensor], targets: Sequence[Tensor]) -> None:
    """Copy the rows of `sources`, block after block, into the rows of `targets`; both have equally many."""
    if len(sources) == len(targets) == 1:
        targets[0].copy_(sources[0])
        return
    reads, writes = iter(sources), iter(targets)
    read = write = None
    while True:
        read = next(reads, None) if read is None or not len(read) else read
        write = next(writes, None) if write is None or not len(write) else write
        if read is None or write is None:
            assert read is None and write is None, "as many rows on both sides"
            return
        rows = min(len(read), len(write))
        write[:rows].copy_(read[:rows])
        read, write = read[rows:], write[rows:]
