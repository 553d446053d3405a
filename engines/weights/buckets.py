"""Messages between two ranks: both ends cut and bundle the same pieces in the same way.

Large pieces are sent alone, in parts of a few MiB: an end that has such a part contiguous sends or receives it in
place. Small pieces share a message, because each message costs as much time as several hundred KiB.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

import torch

from prefect_rlhf.placement.layout.reshard import Piece
from prefect_rlhf.placement.models.engine_constants import BUCKET_BYTES

MESSAGE_BYTES = 8 << 20
ALONE_BYTES = 512 << 10
IN_FLIGHT = 2  # messages that may be under way between two ranks in one direction, at the least

Bucket = tuple[Piece, ...]
"""Pieces of the same number format between a pair of ranks."""


def cut_into_buckets(pieces: Sequence[Piece], formats: Mapping[str, torch.dtype], limit: int) -> list[Bucket]:
    """Cut and bundle a pair's pieces into buckets of at most `limit` bytes each (but at least a row)."""
    alone: list[Bucket] = []
    shared: dict[torch.dtype, list[Piece]] = {}
    for piece in pieces:
        dtype = formats[piece.parameter]
        if num_bytes(piece, dtype) >= min(ALONE_BYTES, limit):
            alone += [(part,) for part in _cut(piece, dtype, limit)]
        else:
            shared.setdefault(dtype, []).append(piece)
    return alone + [bucket for dtype, small in shared.items() for bucket in _bundled(small, dtype, limit)]


def message_bytes(most_peers: int, bucket_bytes: int = BUCKET_BYTES) -> int:
    """Return the size limit of a message if a rank exchanges with up to `most_peers` others in a direction."""
    return min(MESSAGE_BYTES, bucket_bytes // (IN_FLIGHT * max(1, most_peers)))


def num_bytes(piece: Piece, dtype: torch.dtype) -> int:
    """Bytes of a piece in a number format."""
    return piece.num_elements * dtype.itemsize


def _cut(piece: Piece, dtype: torch.dtype, limit: int) -> Iterator[Piece]:
    (start, stop), *columns = piece.region
    row_bytes = num_bytes(piece, dtype) // (stop - start)
    rows = max(1, limit // row_bytes)
    for first in range(start, stop, rows):
        yield replace(piece, region=((first, min(stop, first + rows)), *columns))


def _bundled(pieces: Sequence[Piece], dtype: torch.dtype, limit: int) -> Iterator[Bucket]:
    bucket: list[Piece] = []
    size = 0
    for piece in pieces:
        if bucket and size + num_bytes(piece, dtype) > limit:
            yield tuple(bucket)
            bucket, size = [], 0
        bucket.append(piece)
        size += num_bytes(piece, dtype)
    if bucket:
        yield tuple(bucket)
