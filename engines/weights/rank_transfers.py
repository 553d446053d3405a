"""A rank's part of a reallocation, made once: its internal copies and its messages, all as views of storage."""

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from prefect_rlhf.engines.engine import Shard
from prefect_rlhf.engines.weights.buckets import Bucket, cut_into_buckets, message_bytes
from prefect_rlhf.engines.weights.views import blocks, copy_rows
from prefect_rlhf.placement.layout.reshard import Piece, ReshardPlan

Shards = Mapping[str, Shard]
Blocks = Sequence[Tensor]


@dataclass(frozen=True, slots=True)
class WeightMessage:
    """A bucket at one end: the blocks of each piece there, in transfer order."""

    pieces: tuple[Blocks, ...]
    num_elements: int

    @property
    def like(self) -> Tensor:
        """A tensor with the same format and device."""
        return self.pieces[0][0]

    @property
    def num_bytes(self) -> int:
        return self.num_elements * self.like.element_size()

    @property
    def place(self) -> Tensor | None:
        """The message's contiguous block, to send from or receive into; None if it is not contiguous."""
        alone = len(self.pieces) == 1 and len(self.pieces[0]) == 1
        return self.like if alone and self.like.is_contiguous() else None

    def pack(self, buffer: Tensor) -> Tensor:
        """Fill `buffer` [num_elements] from the blocks."""
        for piece, part in self._parts(buffer):
            copy_rows(piece, [part])
        return buffer

    def unpack(self, buffer: Tensor) -> None:
        """Fill the blocks from `buffer` [num_elements]."""
        for piece, part in self._parts(buffer):
            copy_rows([part], piece)

    def _parts(self, buffer: Tensor) -> list[tuple[Blocks, Tensor]]:
        """Return each piece with its part of the buffer, as rows."""
        sizes = [sum(block.numel() for block in piece) for piece in self.pieces]
        parts = torch.split(buffer, sizes)
        return [(piece, part.view(-1, *piece[0].shape[1:])) for piece, part in zip(self.pieces, parts, strict=True)]


@dataclass(frozen=True, slots=True)
class RankTransfers:
    """A rank's part of a reallocation: the blocks `staying` are copied within it, the others are messages by rank.

    Views stay valid as long as the engines that stated them; offloading empties and refills the same storages.
    """

    staying: tuple[tuple[Blocks, Blocks], ...]
    outgoing: Mapping[int, Sequence[WeightMessage]]
    incoming: Mapping[int, Sequence[WeightMessage]]
    bucket_bytes: int

    @property
    def num_rounds(self) -> int:
        """The largest number of messages in a direction between this rank and another."""
        return max(map(len, [*self.outgoing.values(), *self.incoming.values()]), default=0)

    @property
    def rounds_under_way(self) -> int:
        """How many messages to and from each rank may be in flight at once: as many as a bucket can stage either
        way.
        """
        staged = max(sum(map(_most_staged, ways.values())) for ways in (self.outgoing, self.incoming))
        return max(1, self.bucket_bytes // staged if staged else self.num_rounds)

    @property
    def bytes_received(self) -> int:
        return sum(message.num_bytes for messages in self.incoming.values() for message in messages)

    @property
    def bytes_copied(self) -> int:
        return sum(block.nbytes for _, target in self.staying for block in target)


def plan_rank_transfers(plan: ReshardPlan, rank: int, read: Shards, write: Shards, bucket_bytes: int) -> RankTransfers:
    """Plan the part of `rank` in `plan`, reading and writing these shards, with at most two buckets staged."""
    limit = message_bytes(_most_peers(plan.moved), bucket_bytes)
    outgoing = _by_peer((piece.target, piece) for piece in plan.moved if piece.source == rank)
    incoming = _by_peer((piece.source, piece) for piece in plan.moved if piece.target == rank)
    staying = [piece for piece in plan.local if piece.target == rank]
    return RankTransfers(
        tuple((_blocks(piece, read), _blocks(piece, write)) for piece in staying),
        {peer: _messages(cut_into_buckets(pieces, _formats(read), limit), read) for peer, pieces in outgoing.items()},
        {peer: _messages(cut_into_buckets(pieces, _formats(write), limit), write) for peer, pieces in incoming.items()},
        bucket_bytes,
    )


def _most_staged(messages: Sequence[WeightMessage]) -> int:
    """Bytes of the largest message that is not sent from, or received into, its final place."""
    return max((message.num_bytes for message in messages if message.place is None), default=0)


def _messages(buckets: Iterable[Bucket], shards: Shards) -> list[WeightMessage]:
    return [
        WeightMessage(tuple(_blocks(piece, shards) for piece in bucket), sum(piece.num_elements for piece in bucket))
        for bucket in buckets
    ]


def _blocks(piece: Piece, shards: Shards) -> Blocks:
    return blocks(shards[piece.parameter], piece.region)


def _by_peer(pieces: Iterable[tuple[int, Piece]]) -> dict[int, list[Piece]]:
    by_peer: dict[int, list[Piece]] = defaultdict(list)
    for peer, piece in pieces:
        by_peer[peer].append(piece)
    return dict(sorted(by_peer.items()))


def _most_peers(moved: Iterable[Piece]) -> int:
    """The most others that some rank sends to, or receives from: the same number on every rank."""
    pairs = {(piece.source, piece.target) for piece in moved}
    ends = [("from", source) for source, _ in pairs] + [("to", target) for _, target in pairs]
    return max(Counter(ends).values(), default=0)


def _formats(shards: Shards) -> dict[str, torch.dtype]:
    return {name: shard.view.dtype for name, shard in shards.items()}
