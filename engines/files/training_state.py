"""Writes an engine's training state to shard files, each element once, and reads it back under any layout.

Ranks do not communicate: each writes its own part, under names and regions of the Hugging Face checkpoint.
"""

import ctypes
from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import final

import torch
from torch import Tensor

from prefect_rlhf.engines.commands import BuildCommand, StateRegion
from prefect_rlhf.engines.engine import HasState, StatePart
from prefect_rlhf.engines.files.checkpoint_files import StoredState, write_shard
from prefect_rlhf.engines.weights.offload import HostLink
from prefect_rlhf.errors.errors import RlhfError
from prefect_rlhf.files.storage.mirror import on_this_machine
from prefect_rlhf.placement.devices.strategy import Coordinate
from prefect_rlhf.placement.layout.layout import Layout
from prefect_rlhf.placement.models.engine_constants import MAIN_WEIGHT_BYTES


@final
class HostCopy:
    """A rank's share of an instance's training state in host memory. It is copied between two steps and written later.

    The memory is allocated at the first copy and kept: 12 bytes for each parameter that the rank writes. If the weights
    are sharded over replicas, that is only its own part. With a GPU the memory is pinned.
    """

    def __init__(self, command: BuildCommand, rank: int) -> None:
        self._command, self._rank = command, rank
        self._number = command.ranks.index(rank)
        self._room = torch.empty(0, dtype=torch.uint8)
        self._link: HostLink | None = None
        self._copied: tuple[int, list[StatePart]] | None = None  # optimizer steps so far, and the copies
        self._is_written = True

    def take(self, engine: HasState) -> int:
        """Copy the state that this rank writes; return the number of bytes. Afterwards training may continue.

        Raises RlhfError if the previous copy has not been written yet.
        """
        if not self._is_written:
            raise RlhfError(f"{self._command.instance.name}: its last copy in host memory is not yet on disk")
        strategy = self._command.instance.strategy
        members = dict(zip(self._command.ranks, strategy.coordinates(), strict=True))
        alike = self._command.model.follows is not None
        held = list(_first_held(engine.state_parts(), self._command.layout, members, self._rank, alike))
        self._link = self._link or HostLink(held[0].values.device if held else torch.device("cpu"))
        copies = self._places([part.values.numel() * MAIN_WEIGHT_BYTES for part in held], self._link)
        with self._link.copying():
            for part, copy in zip(held, copies, strict=True):
                _copy(copy, part.values)
        parts = [replace(part, values=copy) for part, copy in zip(held, copies, strict=True)]
        self._copied, self._is_written = (engine.num_updates, parts), False
        return sum(copy.nbytes for copy in copies)

    def write(self, folder: Path) -> list[Path]:
        """Write this rank's shards into a checkpoint, a folder for each set of weights; return their files.

        A set has no file if this rank writes no part of it. This runs concurrently with calls.

        Raises OutputFailed, which names the file, if the disk is full.
        """
        if self._copied is None or self._is_written:
            raise RlhfError(f"{self._command.instance.name}: no copy in host memory is left to write")
        num_updates, parts = self._copied
        name_of, named = self._command.name_of, defaultdict[str, list[StatePart]](list)
        for part in parts:
            named[name_of.get(part.parameter, self._command.instance.role)].append(part)
        files = [write_shard(folder / name, self._number, num_updates, own) for name, own in named.items()]
        self._is_written = True
        return files

    @property
    def copied(self) -> tuple[int, Sequence[StatePart]]:
        """The optimizer's steps and the parts of the newest copy, on disk or not. Raises RlhfError without a copy."""
        if self._copied is None:
            raise RlhfError(f"{self._command.instance.name}: it has no copy in host memory")
        return self._copied

    def close(self) -> None:
        """Free the memory."""
        self._copied, self._is_written = None, True
        self._room = torch.empty(0, dtype=torch.uint8)
        if self._link is not None:
            self._link.close()

    def _places(self, sizes: list[int], link: HostLink) -> list[Tensor]:
        """Return flat float32 tensors of these sizes in bytes, consecutive in the host's memory."""
        if len(self._room) < sum(sizes):
            self._room = link.room(sum(sizes))
        return [place.view(torch.float32) for place in torch.split(self._room[: sum(sizes)], sizes)]


def _copy(target: Tensor, source: Tensor) -> None:
    """Copy a tensor into a flat one in host memory; from a device, do not wait for the end.

    On the CPU a single thread copies: several threads would wait for each other after each of hundreds of parts, which
    takes ten times as long if the processors are busy.
    """
    if source.device.type == "cpu" and source.dtype == target.dtype and source.is_contiguous():
        ctypes.memmove(target.data_ptr(), source.data_ptr(), source.nbytes)
    else:
        target.view(source.shape).copy_(source, non_blocking=True)


def restore(engine: HasState, folders: Sequence[Path], frozen: Collection[str] = ()) -> None:
    """Fill the engine's weights, main weights and moments from its weights' folders, as if it had trained until then.

    Compute weights are the main weights rounded to their format, as the optimizer makes them. `frozen` parameters are
    not in the folders.
    """
    stored = StoredState(*map(on_this_machine, folders))
    with torch.no_grad():
        for name, shard in ((name, shard) for name, shard in engine.weights().items() if name not in frozen):
            shard.view.copy_(stored.read("main", name, shard.region).view(shard.view.shape))
        engine.weights_written()
        engine.begin_after(stored.num_updates)
        for part in engine.state_parts():
            part.values.copy_(stored.read(part.kind, part.parameter, part.region).view(part.values.shape))


def state_writer(engine: HasState, of_optimizer: bool) -> Callable[[StateRegion, Tensor], None]:
    """Return a function that writes a region into the engine's weights or its optimizer's state."""
    weights = engine.weights()
    parts = {(p.kind, p.parameter, p.region): p.values for p in engine.state_parts()} if of_optimizer else {}

    @torch.no_grad()
    def write(region: StateRegion, values: Tensor) -> None:
        if of_optimizer:
            parts[region].copy_(values.view(parts[region].shape))
        else:
            view = weights[region.parameter].view
            view.copy_(values.view(view.shape))

    return write


def _first_held(
    parts: Iterator[StatePart], layout: Layout, members: Mapping[int, Coordinate], rank: int, alike: bool
) -> Iterator[StatePart]:
    """Select the parts for which this rank is the first holder.

    Tensor-parallel ranks all hold a norm, and the first and last stage hold a tied embedding. Ranks with
    the same part in a replica have the same dp coordinate: the optimizer divides each copy over dp in the same way.
    Replicas are `alike` if each holds the whole state, as a follower's do.
    """
    for part in parts:
        regions = layout.regions[part.parameter]
        own_dp = members[rank].dp
        held_by = (r for r, at in members.items() if (alike or at.dp == own_dp) and regions.get(r) == regions[rank])
        if next(held_by) == rank:
            yield part
