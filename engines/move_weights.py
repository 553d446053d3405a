"""Weights from one instance's storage into another's, as the reshard plan says: from views to views, in small messages.

What stays on a rank is copied from storage to storage while messages are under way.
"""

from __future__ import annotations

from collections import Counter, defaultdict, deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice

import torch
import torch.distributed as dist
from torch import Tensor

from prefect_rlhf.engines.engine import Engine, Shard
from prefect_rlhf.engines.orders import MoveWeightsOrder
from prefect_rlhf.engines.parcels import IN_FLIGHT, Parcel, message_bytes, num_bytes, parcels
from prefect_rlhf.engines.regions import blocks, copy_rows
from prefect_rlhf.placement.errors import InvalidInput
from prefect_rlhf.placement.reshard import Piece, reshard

Shards = Mapping[str, Shard]


@dataclass(frozen=True, slots=True)
class Moved:
    """What one rank did: bytes received from other ranks, bytes copied within it, and the most it staged meanwhile."""

    bytes_moved: int = 0
    bytes_copied: int = 0
    peak_extra_bytes: int = 0


def move_weights(source: Engine | None, target: Engine | None, order: MoveWeightsOrder, rank: int) -> Moved:
    """Do this rank's part of `order`. Collective over the ranks of both instances.

    `source` and `target` are this rank's engines of the two instances, None where it has none. Raises InvalidInput
    before anything is moved when the layouts are of different models, the source's does not cover a parameter, or the
    engines' number formats differ.
    """
    plan = reshard(order.source_layout, order.target_layout, order.devices)
    read = source.weights() if source is not None else {}
    write = target.weights() if target is not None else {}
    _check_formats(read, write, order)
    staying = [piece for piece in plan.local if piece.target == rank]
    traffic = Traffic(read, write, plan.moved, rank)
    copied = _run(traffic, staying, read, write)
    if target is not None:
        target.weights_written()
    return Moved(traffic.bytes_received, copied, traffic.staging.num_bytes)


def _run(traffic: Traffic, staying: Sequence[Piece], read: Shards, write: Shards) -> int:
    """Exchange everything, IN_FLIGHT rounds ahead, and copy what stays on the way; return the bytes copied."""
    rest, share = iter(staying), -(-len(staying) // max(1, traffic.num_rounds))
    under_way: deque[Round] = deque()
    copied = 0
    for k in range(traffic.num_rounds):
        if len(under_way) == IN_FLIGHT:
            traffic.finish(under_way.popleft())
        under_way.append(traffic.post(k))
        copied += _copy(islice(rest, share), read, write)
    for posted in under_way:
        traffic.finish(posted)
    return copied + _copy(rest, read, write)


def _copy(pieces: Iterable[Piece], read: Shards, write: Shards) -> int:
    copied = 0
    for piece in pieces:
        copy_rows(blocks(read[piece.parameter], piece.region), blocks(write[piece.parameter], piece.region))
        copied += num_bytes(piece, read[piece.parameter].view.dtype)
    return copied


@dataclass(frozen=True, slots=True)
class Round:
    """Messages under way, and those among them that have to be unpacked when they are here."""

    works: tuple[dist.Work, ...]
    staged: tuple[tuple[Tensor, Parcel], ...]


class Traffic:
    """This rank's messages. In round k goes the k-th message of every pair of ranks.

    A rank posts round k when it has finished round k - IN_FLIGHT, whose messages all ranks post on the same condition;
    so no two wait for each other, and each message under way has memory of its own.
    """

    def __init__(self, read: Shards, write: Shards, moved: Sequence[Piece], rank: int) -> None:
        self._read, self._write = read, write
        limit = message_bytes(_most_peers(moved))
        outgoing = _by_peer((piece.target, piece) for piece in moved if piece.source == rank)
        incoming = _by_peer((piece.source, piece) for piece in moved if piece.target == rank)
        self._outgoing = {peer: parcels(pieces, _formats(read), limit) for peer, pieces in outgoing.items()}
        self._incoming = {peer: parcels(pieces, _formats(write), limit) for peer, pieces in incoming.items()}
        self.num_rounds = max(map(len, [*self._outgoing.values(), *self._incoming.values()]), default=0)
        self.staging = Staging()
        self.bytes_received = 0

    def post(self, k: int) -> Round:
        """Start this rank's messages of round k."""
        received = [(peer, *self._room(parcel, (peer, k % IN_FLIGHT))) for peer, parcel in _of_round(self._incoming, k)]
        sent = [(peer, self._packed(parcel, (peer, k % IN_FLIGHT))) for peer, parcel in _of_round(self._outgoing, k)]
        operations = [dist.P2POp(dist.irecv, message, peer) for peer, message, _ in received]
        operations += [dist.P2POp(dist.isend, message, peer) for peer, message in sent]
        self.bytes_received += sum(message.nbytes for _, message, _ in received)
        works = tuple(dist.batch_isend_irecv(operations)) if operations else ()
        return Round(works, tuple((message, parcel) for _, message, parcel in received if parcel))

    def finish(self, posted: Round) -> None:
        """Wait for a round, and put what it brought where it belongs."""
        for work in posted.works:
            work.wait()
        for message, parcel in posted.staged:
            for part, piece in _parts(message, parcel):
                copy_rows([part], blocks(self._write[piece.parameter], piece.region))

    def _room(self, parcel: Parcel, slot: tuple[int, int]) -> tuple[Tensor, Parcel]:
        """Where a message arrives, and what is to be unpacked from there: nothing when it arrives in its place."""
        place = _in_place(parcel, self._write)
        if place is not None:
            return place, ()
        return self.staging.take(("from", *slot), parcel, self._write), parcel

    def _packed(self, parcel: Parcel, slot: tuple[int, int]) -> Tensor:
        """A message that is ready to be sent."""
        place = _in_place(parcel, self._read)
        if place is not None:
            return place
        message = self.staging.take(("to", *slot), parcel, self._read)
        for part, piece in _parts(message, parcel):
            copy_rows(blocks(self._read[piece.parameter], piece.region), [part])
        return message


class Staging:
    """Reused memory for messages that are not contiguous where they come from or go to."""

    def __init__(self) -> None:
        self._buffers: dict[tuple[str, int, int], Tensor] = {}

    @property
    def num_bytes(self) -> int:
        """All that is staged here; nothing is freed before the end, so it is the peak too."""
        return sum(buffer.nbytes for buffer in self._buffers.values())

    def take(self, slot: tuple[str, int, int], parcel: Parcel, shards: Shards) -> Tensor:
        """Memory for a parcel in the slot of this name; what was in the slot is lost."""
        like = shards[parcel[0].parameter].view
        needed = sum(num_bytes(piece, like.dtype) for piece in parcel)
        buffer = self._buffers.get(slot)
        if buffer is None or buffer.nbytes < needed:
            buffer = self._buffers[slot] = torch.empty(needed, dtype=torch.uint8, device=like.device)
        return buffer[:needed].view(like.dtype)


def _in_place(parcel: Parcel, shards: Shards) -> Tensor | None:
    """The engine's own storage of a parcel where that is one contiguous block."""
    if len(parcel) > 1:
        return None
    found = blocks(shards[parcel[0].parameter], parcel[0].region)
    return found[0] if len(found) == 1 and found[0].is_contiguous() else None


def _parts(message: Tensor, parcel: Parcel) -> Iterator[tuple[Tensor, Piece]]:
    """Each piece of a parcel with its part of the message, in the piece's shape."""
    start = 0
    for piece in parcel:
        stop = start + piece.num_elements
        yield message[start:stop].view([last - first for first, last in piece.region]), piece
        start = stop


def _of_round(parcels_of: Mapping[int, Sequence[Parcel]], k: int) -> list[tuple[int, Parcel]]:
    return [(peer, sequence[k]) for peer, sequence in sorted(parcels_of.items()) if k < len(sequence)]


def _by_peer(pieces: Iterable[tuple[int, Piece]]) -> dict[int, list[Piece]]:
    found: dict[int, list[Piece]] = defaultdict(list)
    for peer, piece in pieces:
        found[peer].append(piece)
    return found


def _most_peers(moved: Iterable[Piece]) -> int:
    """How many others some rank sends to, or receives from: the same number on every rank."""
    pairs = {(piece.source, piece.target) for piece in moved}
    ends = [("from", source) for source, _ in pairs] + [("to", target) for _, target in pairs]
    return max(Counter(ends).values(), default=0)


def _formats(shards: Shards) -> dict[str, torch.dtype]:
    return {name: shard.view.dtype for name, shard in shards.items()}


def _check_formats(read: Shards, write: Shards, order: MoveWeightsOrder) -> None:
    """Converting on the way would make a version's content depend on where it is."""
    for name in read.keys() & write.keys():
        seen, expected = write[name].view.dtype, read[name].view.dtype
        if seen != expected:
            raise InvalidInput(f"{order.target.name} {name}", str(seen), f"{expected}, as in {order.source.name}")
