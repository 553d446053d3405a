"""Weights from one instance's storage into another's, as the reshard plan says: from views to views.

Out of the other rank's memory where it can be read, else in messages: through NCCL on CUDA, through gloo on CPU.
"""

from __future__ import annotations

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
from prefect_rlhf.engines.weights.rank_transfers import RankTransfers, Shards, WeightMessage, plan_rank_transfers
from prefect_rlhf.engines.weights.read_peer_memory import read_memory
from prefect_rlhf.engines.weights.views import copy_rows
from prefect_rlhf.placement.engine_constants import BUCKET_BYTES
from prefect_rlhf.placement.errors import InvalidInput
from prefect_rlhf.placement.layout.reshard import reshard
from prefect_rlhf.placement.plan import ModelInstance

NOTHING: Shards = MappingProxyType({})


@dataclass(frozen=True, slots=True)
class Moved:
    """What one rank did: bytes received from other ranks, bytes copied within it, and the most it staged meanwhile."""

    bytes_moved: int
    bytes_copied: int
    peak_extra_bytes: int


@final
class WeightMover:
    """Moves weights to and from one rank's engines. A route is made once: it is the same in every step.

    At most `bucket_bytes` are staged for sending, and as many for receiving.
    """

    def __init__(self, rank: int, bucket_bytes: int = BUCKET_BYTES) -> None:
        self.rank, self.bucket_bytes = rank, bucket_bytes
        self._routes: dict[tuple[ModelInstance, ModelInstance], tuple[Shards, Shards, RankTransfers]] = {}

    def move(self, source: Engine | None, target: Engine | None, command: MoveWeightsCommand) -> Moved:
        """Do this rank's part of `command`. Collective over the ranks of both instances.

        `source` and `target` are this rank's engines of the two instances, None where it has none. Raises InvalidInput
        before anything is moved when the layouts are of different models, the source's does not cover a parameter, or
        the engines' number formats differ.
        """
        route = self.route(source, target, command)
        staged = bring(route)
        copy_within(route)
        if target is not None:
            target.weights_written()
        return Moved(route.bytes_received, route.bytes_copied, staged)

    def route(self, source: Engine | None, target: Engine | None, command: MoveWeightsCommand) -> RankTransfers:
        """This rank's part of `command`; made anew only when an engine states other shards than before."""
        read = NOTHING if source is None else source.weights()
        write = NOTHING if target is None else target.weights()
        known = self._routes.get((command.source, command.target))
        if known is not None and known[0] is read and known[1] is write:
            return known[2]
        plan = reshard(command.source_layout, command.target_layout, command.devices)
        _check_formats(read, write, command)
        route = plan_rank_transfers(plan, self.rank, read, write, self.bucket_bytes)
        self._routes[command.source, command.target] = read, write, route
        return route


def copy_within(route: RankTransfers) -> None:
    """Copy what stays on the rank, from storage to storage."""
    for source, target in route.staying:
        copy_rows(source, target)


def bring(route: RankTransfers) -> int:
    """Bring what other ranks have, out of their memory or in messages; return the bytes staged."""
    return exchange(read_memory(route))


def exchange(route: RankTransfers) -> int:
    """Send and receive all that goes between ranks; return the bytes staged for it.

    In round k goes the k-th message of every pair of ranks, posted in the order of the rounds. A rank waits only for
    the first of its rounds that is not finished, and all before it are finished everywhere, or so is a rank that waits
    for an earlier one; so no two wait for each other. Each message under way has memory of its own.
    """
    most = route.rounds_under_way
    staging = Staging(most)
    under_way: deque[MessageRound] = deque()
    for k in range(route.num_rounds):
        if len(under_way) == most:
            under_way.popleft().finish()
        under_way.append(_post(route, k, staging))
    for posted in under_way:
        posted.finish()
    return staging.num_bytes


class Staging:
    """Reused memory for messages that are not contiguous where they come from or go to, `rounds` at a time."""

    def __init__(self, rounds: int) -> None:
        self._rounds = rounds
        self._buffers: dict[tuple[str, int, int], Tensor] = {}

    @property
    def num_bytes(self) -> int:
        """All that is staged here; nothing is freed before the end, so it is the peak too."""
        return sum(buffer.nbytes for buffer in self._buffers.values())

    def take(self, message: WeightMessage, direction: str, peer: int, k: int) -> Tensor:
        """Memory for the message of round k; what round k - `rounds` had there is lost."""
        slot = direction, peer, k % self._rounds
        buffer = self._buffers.get(slot)
        if buffer is None or buffer.nbytes < message.num_bytes:
            buffer = torch.empty(message.num_bytes, dtype=torch.uint8, device=message.like.device)
            self._buffers[slot] = buffer
        return buffer[: message.num_bytes].view(message.like.dtype)


@dataclass(frozen=True, slots=True)
class MessageRound:
    """Messages under way, and those among them that have to be unpacked when they are here."""

    works: Sequence[dist.Work]
    staged: Sequence[tuple[WeightMessage, Tensor]]

    def finish(self) -> None:
        """Wait for the messages, and put what they brought where it belongs."""
        for work in self.works:
            work.wait()
        for message, buffer in self.staged:
            message.unpack(buffer)


def _post(route: RankTransfers, k: int, staging: Staging) -> MessageRound:
    """Start this rank's messages of round k."""
    received: list[tuple[Tensor, int]] = []
    sent: list[tuple[Tensor, int]] = []
    staged: list[tuple[WeightMessage, Tensor]] = []
    for peer, message in _of_round(route.incoming, k):
        place = message.place
        if place is None:
            place = staging.take(message, "from", peer, k)
            staged.append((message, place))
        received.append((place, peer))
    for peer, message in _of_round(route.outgoing, k):
        place = message.place
        if place is None:
            place = message.pack(staging.take(message, "to", peer, k))
        sent.append((place, peer))
    return MessageRound(_start(received, sent), staged)


def _start(received: Sequence[tuple[Tensor, int]], sent: Sequence[tuple[Tensor, int]]) -> list[dist.Work]:
    """Post what is received from and sent to each peer. NCCL needs that as one batch; gloo is quicker without."""
    if any(tensor.is_cuda for tensor, _ in (*received, *sent)):
        operations = [dist.P2POp(dist.irecv, tensor, peer) for tensor, peer in received]
        operations += [dist.P2POp(dist.isend, tensor, peer) for tensor, peer in sent]
        return dist.batch_isend_irecv(operations)
    works = [dist.irecv(tensor, peer) for tensor, peer in received]
    works += [dist.isend(tensor, peer) for tensor, peer in sent]
    return [work for work in works if work is not None]  # None is for ranks outside of the group


def _of_round(messages_of: Mapping[int, Sequence[WeightMessage]], k: int) -> Iterator[tuple[int, WeightMessage]]:
    return ((peer, messages[k]) for peer, messages in messages_of.items() if k < len(messages))


def _check_formats(read: Shards, write: Shards, command: MoveWeightsCommand) -> None:
    """Converting on the way would make a version's content depend on where it is."""
    for name in read.keys() & write.keys():
        seen, expected = write[name].view.dtype, read[name].view.dtype
        if seen != expected:
            raise InvalidInput(f"{command.target.name} {name}", str(seen), f"{expected}, as in {command.source.name}")
