"""Weights from one instance's storage into another's, as the reshard plan says: from views to views."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from prefect_rlhf.engines.engine import Engine, Shard
from prefect_rlhf.engines.orders import MoveWeightsOrder
from prefect_rlhf.engines.swap import swap
from prefect_rlhf.placement.errors import InvalidInput
from prefect_rlhf.placement.layout import Region
from prefect_rlhf.placement.reshard import Piece, reshard

BUCKET_BYTES = 64 << 20  # the most that is staged at once for one peer


def move_weights(source: Engine | None, target: Engine | None, order: MoveWeightsOrder, rank: int) -> int:
    """Do this rank's part of `order`; return the bytes written here. Collective over the ranks of both instances.

    `source` and `target` are this rank's engines of the two instances, None where it has none.
    """
    read = source.weights() if source is not None else {}
    write = target.weights() if target is not None else {}
    _check_formats(read, write, order)
    plan = reshard(order.source_layout, order.target_layout)
    writer = RegionWriter(write)
    written = _copy_local([piece for piece in plan.local if piece.target == rank], read, writer)
    written += _copy_remote(plan.moved, read, writer, rank)
    writer.flush()
    if target is not None:
        target.weights_written()
    return written


@dataclass(frozen=True, slots=True)
class RegionWriter:
    """Writes regions into shards. A shard whose view splits its axes is assembled aside, and written by `flush`."""

    shards: Mapping[str, Shard]
    _aside: dict[str, Tensor] = field(default_factory=dict)

    def write(self, parameter: str, region: Region, values: Tensor) -> None:
        shard = self.shards[parameter]
        if region == shard.region:
            shard.view.copy_(values.reshape(shard.view.shape))
            return
        whole = shard.view
        if whole.shape != shard.shape:
            if parameter not in self._aside:
                self._aside[parameter] = shard.view.reshape(shard.shape).clone()
            whole = self._aside[parameter]
        part = whole[within(region, shard.region)]
        part.copy_(values.reshape(part.shape))

    def flush(self) -> None:
        for parameter, whole in self._aside.items():
            view = self.shards[parameter].view
            view.copy_(whole.reshape(view.shape))
        self._aside.clear()


def read_region(shard: Shard, region: Region) -> Tensor:
    """The values of a region within the shard's, in row-major order; a view of them where that is possible."""
    if region == shard.region:
        return shard.view
    return shard.view.reshape(shard.shape)[within(region, shard.region)]


def within(region: Region, outer: Region) -> tuple[slice, ...]:
    """`region` as slices of a tensor that holds `outer`.

    >>> within(((4, 6), (0, 8)), ((4, 8), (0, 8)))
    (slice(0, 2, None), slice(0, 8, None))
    """
    axes = zip(region, outer, strict=True)
    return tuple(slice(start - first, stop - first) for (start, stop), (first, _) in axes)


def buckets(pieces: Iterable[Piece], shards: Mapping[str, Shard], limit: int = BUCKET_BYTES) -> list[list[Piece]]:
    """Cut a peer's pieces into rounds of at most `limit` bytes each, the same way on both ends."""
    rounds: list[list[Piece]] = []
    room = 0
    for whole in pieces:
        for piece in _cut(whole, shards, limit):
            size = _num_bytes(piece, shards)
            if size > room or not rounds:
                rounds.append([])
                room = limit
            rounds[-1].append(piece)
            room -= size
    return rounds


def _cut(piece: Piece, shards: Mapping[str, Shard], limit: int) -> list[Piece]:
    """Cut a piece of more than `limit` bytes into some rows each."""
    (start, stop), *rest = piece.region
    row_bytes = max(1, _num_bytes(piece, shards) // (stop - start))
    rows = max(1, limit // row_bytes)
    cuts = [(first, min(stop, first + rows)) for first in range(start, stop, rows)]
    return [replace(piece, region=(cut, *rest)) for cut in cuts]


def _num_bytes(piece: Piece, shards: Mapping[str, Shard]) -> int:
    return piece.num_elements * shards[piece.parameter].view.element_size()


def _copy_local(pieces: Iterable[Piece], read: Mapping[str, Shard], writer: RegionWriter) -> int:
    """Copy what stays on this rank; equal regions go view to view, with nothing between."""
    written = 0
    for piece in pieces:
        writer.write(piece.parameter, piece.region, read_region(read[piece.parameter], piece.region))
        written += _num_bytes(piece, read)
    return written


def _copy_remote(pieces: Sequence[Piece], read: Mapping[str, Shard], writer: RegionWriter, rank: int) -> int:
    """Exchange the rest: the k-th bucket of every pair of ranks goes in the k-th round, on both ends."""
    targets = sorted({p.target for p in pieces if p.source == rank})
    sources = sorted({p.source for p in pieces if p.target == rank})
    sent = {t: buckets([p for p in pieces if (p.source, p.target) == (rank, t)], read) for t in targets}
    received = {s: buckets([p for p in pieces if (p.source, p.target) == (s, rank)], writer.shards) for s in sources}
    written = 0
    for k in range(max(map(len, [*sent.values(), *received.values()]), default=0)):
        outgoing = {peer: [_pack(rounds[k], read)] for peer, rounds in sent.items() if k < len(rounds)}
        incoming = {peer: [_room(rounds[k], writer)] for peer, rounds in received.items() if k < len(rounds)}
        swap(outgoing, incoming)
        for peer, [bucket] in incoming.items():
            _unpack(bucket, received[peer][k], writer)
            written += bucket.numel()
    return written


def _pack(pieces: Iterable[Piece], read: Mapping[str, Shard]) -> Tensor:
    """The pieces' bytes, one after the other."""
    values = (read_region(read[piece.parameter], piece.region) for piece in pieces)
    return torch.cat([part.contiguous().flatten().view(torch.uint8) for part in values])


def _room(pieces: Sequence[Piece], writer: RegionWriter) -> Tensor:
    device = writer.shards[pieces[0].parameter].view.device
    return torch.empty(sum(_num_bytes(p, writer.shards) for p in pieces), dtype=torch.uint8, device=device)


def _unpack(bucket: Tensor, pieces: Iterable[Piece], writer: RegionWriter) -> None:
    for piece in pieces:
        size = _num_bytes(piece, writer.shards)
        values, bucket = bucket[:size].clone(), bucket[size:]  # a copy is aligned for any number format
        shape = [stop - start for start, stop in piece.region]
        writer.write(piece.parameter, piece.region, values.view(writer.shards[piece.parameter].view.dtype).view(shape))


def _check_formats(read: Mapping[str, Shard], write: Mapping[str, Shard], order: MoveWeightsOrder) -> None:
    """Converting on the way would make a version's content depend on where it is."""
    for name in read.keys() & write.keys():
        seen, expected = write[name].view.dtype, read[name].view.dtype
        if seen != expected:
            raise InvalidInput(f"{order.target.name} {name}", str(seen), f"{expected}, as in {order.source.name}")
