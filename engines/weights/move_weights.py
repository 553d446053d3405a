"""Moves weights from one instance's storage into another's, as the reshard plan says: from views to views.

They are read from the other rank's memory if possible, else sent in messages, through NCCL or gloo.
"""

from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import final

import torch
import torch.distributed as dist
from torch import Tensor

from prefect_rlhf.engines.commands import MoveWeightsCommand
from prefect_rlhf.engines.engine import Engine
from prefect_rlhf.engines.process_groups import uses_nccl
from prefect_rlhf.engines.weights.rank_transfers import RankTransfers, Shards, WeightMessage, plan_rank_transfers
from prefect_rlhf.engines.weights.read_peer_memory import read_peer_memory
from prefect_rlhf.engines.weights.views import copy_rows
from prefect_rlhf.errors.errors import InvalidInput
from prefect_rlhf.placement.layout.reshard import reshard
from prefect_rlhf.placement.models.engine_constants import BUCKET_BYTES
from prefect_rlhf.placement.plan import ModelInstance

NOTHING: Shards = MappingProxyType({})


@dataclass(frozen=True, slots=True)
class Moved:
    """A rank's part: bytes received from other ranks, bytes copied within it, and its peak of staged bytes."""

    bytes_moved: int
    bytes_copied: int
    peak_extra_bytes: int


@final
class WeightMover:
    """Moves weights to and from a rank's engines. Transfers are planned once, because they are the same in every step.

    At most `bucket_bytes` are staged for sending, and as many for receiving.
    """

    def __init__(self, rank: int, bucket_bytes: int = BUCKET_BYTES) -> None:
        self.rank, self.bucket_bytes = rank, bucket_bytes
        self._planned: dict[tuple[ModelInstance, ModelInstance], tuple[Shards, Shards, RankTransfers]] = {}

    def move(self, source: Engine | None, target: Engine | None, command: MoveWeightsCommand) -> Moved:
        """Do this rank's part of `command`. Collective over the ranks of both instances.

        `source` and `target` are this rank's engines of the two instances, or None. Before any byte moves, raises
        InvalidInput if the layouts belong to different models, the source does not cover a parameter, or the engines'
        number formats differ.
        """
        transfers = self.transfers(source, target, command)
        staged = fetch(transfers)
        for read, written in transfers.staying:
            copy_rows(read, written)
        if target is not None:
            target.weights_written()
        return Moved(transfers.bytes_received, transfers.bytes_copied, staged)

    def forget(self, instance: ModelInstance) -> None:
        """Drop the plans from and to a closed instance, because they refer to its weights."""
        self._planned = {pair: planned for pair, planned in self._planned.items() if instance not in pair}

    def transfers(self, source: Engine | None, target: Engine | None, command: MoveWeightsCommand) -> RankTransfers:
        """Return this rank's part of `command`, planned again only if an engine's shards have changed."""
        read = NOTHING if source is None else source.weights()
        write = NOTHING if target is None else target.weights()
        planned = self._planned.get((command.source, command.target))
        if planned is not None and planned[0] is read and planned[1] is write:
            return planned[2]
        plan = reshard(command.source_layout, command.target_layout, command.devices)
        _check_formats(read, write, command)
        transfers = plan_rank_transfers(plan, self.rank, read, write, self.bucket_bytes)
        self._planned[command.source, command.target] = read, write, transfers
        return transfers


def fetch(transfers: RankTransfers) -> int:
    """Fetch blocks of other ranks, from their memory or in messages; return the bytes staged."""
    return exchange(read_peer_memory(transfers))


def exchange(transfers: RankTransfers) -> int:
    """Send and receive all messages between ranks; return the bytes staged for it.

    Round k has the k-th message of every pair of ranks, posted in the order of the rounds. A rank waits only for its
    first unfinished round. All earlier rounds are finished everywhere, or another rank waits for an earlier round, so
    no two ranks wait for each other. Each message in flight has separate memory.
    """
    most = transfers.rounds_under_way
    staging = Staging(most)
    under_way: deque[MessageRound] = deque()
    for k in range(transfers.num_rounds):
        if len(under_way) == most:
            under_way.popleft().finish()
        under_way.append(_post(transfers, k, staging))
    for message_round in under_way:
        message_round.finish()
    return staging.num_bytes


class Staging:
    """Reused memory for messages that are not contiguous at their end, for `rounds` rounds at a time."""

    def __init__(self, rounds: int) -> None:
        self._rounds = rounds
        self._buffers: dict[tuple[str, int, int], Tensor] = {}

    @property
    def num_bytes(self) -> int:
        """Bytes of all buffers; they are freed together at the end, so they are the peak too."""
        return sum(buffer.nbytes for buffer in self._buffers.values())

    def take(self, message: WeightMessage, direction: str, peer: int, k: int) -> Tensor:
        """Return memory for the message of round k; the message of round k - `rounds` is overwritten."""
        slot = direction, peer, k % self._rounds
        buffer = self._buffers.get(slot)
        if buffer is None or buffer.nbytes < message.num_bytes:
            buffer = torch.empty(message.num_bytes, dtype=torch.uint8, device=message.like.device)
            self._buffers[slot] = buffer
        return buffer[: message.num_bytes].view(message.like.dtype)


@dataclass(frozen=True, slots=True)
class MessageRound:
    """A round of messages in flight, and those that have to be unpacked when they have arrived."""

    works: Sequence[dist.Work]
    staged: Sequence[tuple[WeightMessage, Tensor]]

    def finish(self) -> None:
        """Wait for the messages, and unpack those that were staged."""
        for work in self.works:
            work.wait()
        for message, buffer in self.staged:
            message.unpack(buffer)


def _post(transfers: RankTransfers, k: int, staging: Staging) -> MessageRound:
    """Start this rank's messages of round k."""
    received: list[tuple[Tensor, int]] = []
    sent: list[tuple[Tensor, int]] = []
    staged: list[tuple[WeightMessage, Tensor]] = []
    for peer, message in _of_round(transfers.incoming, k):
        place = message.place
        if place is None:
            place = staging.take(message, "from", peer, k)
            staged.append((message, place))
        received.append((place, peer))
    for peer, message in _of_round(transfers.outgoing, k):
        place = message.place
        if place is None:
            place = message.pack(staging.take(message, "to", peer, k))
        sent.append((place, peer))
    return MessageRound(_start(received, sent), staged)


def _start(received: Sequence[tuple[Tensor, int]], sent: Sequence[tuple[Tensor, int]]) -> list[dist.Work]:
    """Post the receives from and the sends to each peer. NCCL needs them as a single batch; gloo is faster without."""
    if any(uses_nccl(tensor) for tensor, _ in (*received, *sent)):
        operations = [dist.P2POp(dist.irecv, tensor, peer) for tensor, peer in received]
        operations += [dist.P2POp(dist.isend, tensor, peer) for tensor, peer in sent]
        return dist.batch_isend_irecv(operations)
    works = [dist.irecv(tensor, peer) for tensor, peer in received]
    works += [dist.isend(tensor, peer) for tensor, peer in sent]
    return [work for work in works if work is not None]  # None is for ranks outside of the group


def _of_round(messages_of: Mapping[int, Sequence[WeightMessage]], k: int) -> Iterator[tuple[int, WeightMessage]]:
    return ((peer, messages[k]) for peer, messages in messages_of.items() if k < len(messages))


def _check_formats(read: Shards, write: Shards, command: MoveWeightsCommand) -> None:
    """Raise InvalidInput for two number formats: after a conversion, a version's content would depend on its place."""
    for name in read.keys() & write.keys():
        seen, expected = write[name].view.dtype, read[name].view.dtype
        if seen != expected:
            raise InvalidInput(f"{command.target.name} {name}", str(seen), f"{expected}, as in {command.source.name}")
