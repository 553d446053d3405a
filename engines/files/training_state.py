"""An engine's training state to and from shard files: every element is written once, and read under any layout.

No rank talks to another: each writes what it holds, under names and regions of the Hugging Face checkpoint.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path

import torch

from prefect_rlhf.engines.commands import BuildCommand
from prefect_rlhf.engines.engine import StatePart, TrainingEngine
from prefect_rlhf.engines.files.checkpoint_files import StoredState, write_shard
from prefect_rlhf.placement.layout.layout import Layout
from prefect_rlhf.placement.strategy import Coordinate


def save(engine: TrainingEngine, command: BuildCommand, folder: Path, rank: int) -> int:
    """Write this rank's shard into a role's folder; return the bytes."""
    members = dict(zip(command.ranks, command.instance.strategy.coordinates(), strict=True))
    number = command.ranks.index(rank)
    return write_shard(
        folder, number, engine.num_updates, _first_held(engine.state_parts(), command.layout, members, rank)
    )


def restore(engine: TrainingEngine, folder: Path) -> None:
    """Fill the engine's weights, main weights and moments from a role's folder, as if it had trained that far itself.

    Compute weights are the main weights rounded to their format, as the optimizer makes them.
    """
    stored = StoredState(folder)
    with torch.no_grad():
        for name, shard in engine.weights().items():
            shard.view.copy_(stored.read("main", name, shard.region).view(shard.view.shape))
        engine.weights_written()
        engine.begin_after(stored.num_updates)
        for part in engine.state_parts():
            part.values.copy_(stored.read(part.kind, part.parameter, part.region).flatten())


def _first_held(
    parts: Iterator[StatePart], layout: Layout, members: Mapping[int, Coordinate], rank: int
) -> Iterator[StatePart]:
    """Select the parts of which this rank is the first holder.

    Tensor-parallel ranks all hold a norm, the first and last stage a tied embedding; a replica's twins have its dp
    coordinate, since the optimizer shares each of these out over dp in the same way.
    """
    for part in parts:
        regions = layout.regions[part.parameter]
        held_by = (r for r, at in members.items() if at.dp == members[rank].dp and regions.get(r) == regions[rank])
        if next(held_by) == rank:
            yield part
