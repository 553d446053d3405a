"""A model instance's process groups, made only by its members, without Megatron's globals.

Axes: p pipeline stage, d data-parallel replica, t tensor-parallel shard.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

import torch
import torch.distributed as dist
from megatron.core.process_groups_config import ProcessGroupCollection

from prefect_rlhf.engines.process_groups import (
    ensure_world,
    name_groups_by_members,
    open_communicators,
    world_limit,
)
from prefect_rlhf.placement.devices.strategy import Coordinate, Strategy


@dataclass(frozen=True, slots=True)
class Groups:
    """This rank's coordinate on the mesh and its groups along each axis; `collection` is the same for Megatron."""

    coordinate: Coordinate
    strategy: Strategy
    ranks: tuple[int, ...]
    collection: ProcessGroupCollection
    mesh: dist.ProcessGroup

    @property
    def tp(self) -> dist.ProcessGroup:
        return cast(dist.ProcessGroup, self.collection.tp)

    @property
    def dp(self) -> dist.ProcessGroup:
        return cast(dist.ProcessGroup, self.collection.dp)

    @property
    def pp(self) -> dist.ProcessGroup:
        return cast(dist.ProcessGroup, self.collection.pp)

    @property
    def replica(self) -> dist.ProcessGroup:
        """All stages and shards of this rank's data-parallel replica; tp varies fastest."""
        return cast(dist.ProcessGroup, self.collection.mp)

    @property
    def is_first_stage(self) -> bool:
        return self.coordinate.pp == 0

    @property
    def is_last_stage(self) -> bool:
        return self.coordinate.pp == self.strategy.pp - 1

    @property
    def last_stage_rank(self) -> int:
        """World rank of this rank's counterpart on the last stage."""
        return dist.get_global_rank(self.pp, self.strategy.pp - 1)


def build_groups(ranks: Sequence[int], strategy: Strategy, rank: int) -> Groups:
    """Make the groups of `rank`. Every rank of `ranks`, and no other rank, must call this in the same order."""
    ensure_world()
    name_groups_by_members()
    grid_PDT = torch.tensor(list(ranks)).view(strategy.pp, strategy.dp, strategy.tp)
    p, d, t = (int(index) for index in (grid_PDT == rank).nonzero()[0])
    mesh = _group(grid_PDT)
    collection = _collection(grid_PDT, p, d, t, mesh)
    # Along each axis all members come to their group at the same place of this list.
    axes = (collection.tp, collection.dp, collection.pp, collection.mp, collection.embd, mesh)
    open_communicators(group for group in axes if group is not None)
    return Groups(Coordinate(dp=d, tp=t, pp=p), strategy, tuple(ranks), collection, mesh)


def _collection(grid_PDT: torch.Tensor, p: int, d: int, t: int, mesh: dist.ProcessGroup) -> ProcessGroupCollection:
    """Name the groups as Megatron does; groups of expert and context parallelism are unused and trivial."""
    last = grid_PDT.shape[0] - 1
    groups = ProcessGroupCollection()
    groups.tp, groups.dp = _group(grid_PDT[p, d, :]), _group(grid_PDT[p, :, t])
    groups.pp, groups.mp = _group(grid_PDT[:, d, t]), _group(grid_PDT[:, d, :])
    groups.cp = _group(grid_PDT[p, d, t])
    ends = grid_PDT[[0, last], d, t] if last else grid_PDT[:, d, t]
    groups.embd = _group(ends) if p in (0, last) else None
    groups.pos_embd = None
    groups.dp_cp = groups.intra_dp_cp = groups.expt_dp = groups.intra_expt_dp = groups.dp
    groups.ep = groups.expt_tp = groups.tp_ep = groups.cp
    groups.tp_ep_pp, groups.tp_cp = groups.mp, groups.tp
    groups.intra_dist_opt, groups.inter_dist_opt = mesh, None
    return groups


def _group(ranks: torch.Tensor) -> dist.ProcessGroup:
    """Return the group of these ranks in their order: sorted, a mesh such as [7, 2] would run its pipeline backwards.

    A process makes it once. A rank does a single task at a time and so do its peers, so axes and instances can share
    it. Each group costs a communicator: on GPUs memory, with gloo a thread that wakes a hundred times a second.
    """
    members = tuple(ranks.flatten().tolist())
    groups = _groups.of_world()
    if members not in groups:
        options: dict[str, Any] = {"use_local_synchronization": True, "sort_ranks": False, "timeout": world_limit()}
        groups[members] = dist.new_group(list(members), **options)
    return groups[members]


class _GroupsOfWorld:
    """A table of the groups that this process made in the present world, by their members."""

    def __init__(self) -> None:
        self._world: dist.ProcessGroup | None = None
        self._groups: dict[tuple[int, ...], dist.ProcessGroup] = {}

    def of_world(self) -> dict[tuple[int, ...], dist.ProcessGroup]:
        """The groups by members; empty after a new `init_process_group`."""
        if self._world is not dist.group.WORLD:
            self._world, self._groups = dist.group.WORLD, {}
        return self._groups


_groups = _GroupsOfWorld()


def group_of_tp_ranks(groups: Groups, start: int, stop: int) -> dist.ProcessGroup:
    """Return the group of tp ranks `start` to `stop` of this rank's tensor-parallel group; each member must call it."""
    strategy, at = groups.strategy, groups.coordinate
    grid_PDT = torch.tensor(groups.ranks).view(strategy.pp, strategy.dp, strategy.tp)
    group = _group(grid_PDT[at.pp, at.dp, start:stop])
    open_communicators([group])
    return group


@contextmanager
def only(mesh: dist.ProcessGroup) -> Iterator[None]:
    """Make `mesh` look like the world to code that asks torch for the world size or gathers objects over it.

    Megatron's optimizer does both while it is built, and would wait for ranks outside the mesh.
    """
    originals: dict[str, Any] = {name: getattr(dist, name) for name in ("get_world_size", "all_gather_object")}
    dist.get_world_size = lambda group=None: originals["get_world_size"](group or mesh)
    dist.all_gather_object = partial(originals["all_gather_object"], group=mesh)
    try:
        yield
    finally:
        for name, original in originals.items():
            setattr(dist, name, original)
