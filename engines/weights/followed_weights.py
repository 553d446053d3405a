"""The weights of a follower, which become averages of its own weights and its leader's.

An element's average is two products and a sum, each rounded to float32 in every layout, so its bits and the follower's
fingerprint do not depend on the plan. The leader's weights are its compute weights, by which a version is checked.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from typing import final

import torch
from torch import Tensor

from prefect_rlhf.engines.commands import FollowCommand
from prefect_rlhf.engines.engine import Engine, Shard, StatePart
from prefect_rlhf.engines.weights.move_weights import NOTHING, Moved, WeightMover, fetch
from prefect_rlhf.engines.weights.offload import OffloadedTensors
from prefect_rlhf.engines.weights.rank_transfers import plan_rank_transfers
from prefect_rlhf.engines.weights.views import copy_rows
from prefect_rlhf.placement.layout.layout import Layout
from prefect_rlhf.placement.layout.reshard import reshard
from prefect_rlhf.placement.models.engine_constants import FOLLOWED_ELEMENTS
from prefect_rlhf.placement.models.model import Dtype


@final
class FollowedWeights:
    """A follower's state on a rank: its engine's weights without frozen weights, and perhaps float32 main weights.

    With main weights, these are averaged and then rounded to the compute weights' format, because an average in
    bfloat16 would lose small shares.
    """

    num_updates = 0

    def __init__(self, engine: Engine, frozen: Collection[str], keeps_main: bool) -> None:
        self.engine, self._frozen = engine, frozenset(frozen)
        self._main: dict[str, Tensor] = {}
        if keeps_main:
            self._main = {name: shard.view.reshape(shard.shape).float() for name, shard in self._own().items()}
        devices = {main.device for main in self._main.values()} or {torch.device("cpu")}
        self._offloaded = OffloadedTensors(devices.pop())

    def weights(self) -> Mapping[str, Shard]:
        """See Engine."""
        return self.engine.weights()

    def weights_written(self) -> None:
        """Update main weights from the compute weights, after these were written from outside."""
        self.engine.weights_written()
        self._offloaded.written()
        for name, main in self._main.items():
            main.copy_(self.weights()[name].view.reshape(main.shape))

    def state_parts(self) -> Iterator[StatePart]:
        """See HasState: main weights, or the compute weights themselves."""
        for name, shard in self._own().items():
            yield StatePart("main", name, shard.region, self._main.get(name, shard.view))

    def begin_after(self, num_updates: int) -> None:
        """See HasState: it has no optimizer."""

    @torch.no_grad()
    def average(self, arrived: dict[str, Tensor], share: float) -> None:
        """Average its weights with the leader's weights that have arrived, and free the latter."""
        shards = self.weights()
        for name in list(arrived):
            theirs, view = arrived.pop(name).float().mul_(share), shards[name].view
            own = self._main.get(name)
            if share == 1:
                view.copy_(theirs.view(view.shape))
            elif own is None:
                view.mul_(1 - share).add_(theirs.view(view.shape))
            else:
                view.copy_(own.mul_(1 - share).add_(theirs).view(view.shape))

    def averaged(self) -> None:
        """Put the new compute weights to use, after the last `average` of a version."""
        self._offloaded.written()
        self.engine.weights_written()

    def device_bytes(self) -> int:
        """Device bytes of the main weights."""
        return sum(main.untyped_storage().nbytes() for main in self._main.values())

    def offload(self, copies: bool) -> int:
        """Free the main weights on the device; return the bytes copied to the host."""
        return self._offloaded.offload(list(self._main.values()), copies=copies) if self._main else 0

    def reload(self) -> int:
        """Bring the main weights back; return the bytes copied from the host."""
        return self._offloaded.reload()

    def _own(self) -> dict[str, Shard]:
        return {name: shard for name, shard in self.weights().items() if name not in self._frozen}


def average(source: Engine | None, target: FollowedWeights | None, command: FollowCommand, mover: WeightMover) -> Moved:
    """Do this rank's part of a follow. Collective over the ranks of both instances.

    `source` and `target` are this rank's engine of the leader and its part of the follower, or None. The leader's
    weights arrive in groups, and their memory is free again once they are averaged. A share of 1 in the same format is
    a plain move.
    """
    move, moved = command.move, Moved(0, 0, 0)
    if command.is_copy:
        return mover.move(source, target and target.engine, move)
    read = NOTHING if source is None else source.weights()
    written = NOTHING if target is None else target.weights()
    for names in groups_of_weights(move.target_layout):
        own = {name: written[name] for name in names if name in written}
        arrived = {name: _room(shard, command.dtype) for name, shard in own.items()}
        shards = {name: Shard(own[name].region, room) for name, room in arrived.items()}
        moves = reshard(move.source_layout.only(names), move.target_layout.only(names), move.devices)
        transfers = plan_rank_transfers(moves, mover.rank, read, shards, mover.bucket_bytes)
        staged = fetch(transfers) + sum(tensor.nbytes for tensor in arrived.values())
        for sent, received in transfers.staying:
            copy_rows(sent, received)
        moved = Moved(
            moved.bytes_moved + transfers.bytes_received,
            moved.bytes_copied + transfers.bytes_copied,
            max(moved.peak_extra_bytes, staged),
        )
        del transfers, shards
        if target is not None:
            target.average(arrived, command.share)
    if target is not None:
        target.averaged()
    return moved


def _room(shard: Shard, dtype: Dtype) -> Tensor:
    """Return memory for a leader's part of a weight, in the leader's format."""
    return torch.empty(shard.shape, dtype=getattr(torch, dtype), device=shard.view.device)


def groups_of_weights(layout: Layout) -> Iterator[tuple[str, ...]]:
    """Yield the names of a layout in groups, the same on every rank: several small weights, or a single larger
    weight.
    """
    group: list[str] = []
    total = 0
    for name, shape in layout.shapes.items():
        size = torch.Size(shape).numel()
        if group and total + size > FOLLOWED_ELEMENTS:
            yield tuple(group)
            group, total = [], 0
        group.append(name)
        total += size
    if group:
        yield tuple(group)
