"""Checkpoints without a run: shards of zeros of all trained weights, and a commit."""

from pathlib import Path

import torch

from prefect_rlhf.engines.engine import StatePart
from prefect_rlhf.engines.files.checkpoint_files import write_shard
from prefect_rlhf.placement.augmented.augmented_graph import AugmentedGraph
from prefect_rlhf.tasks.checkpoints.folders import beside, finish, folder_of
from prefect_rlhf.tasks.checkpoints.lineage import Lineage
from prefect_rlhf.tasks.checkpoints.run_identity import run_identity


def write_shards(augmented: AugmentedGraph, run_dir: Path, step: int, without: str = "") -> None:
    """What ranks write: a shard for each trained set of weights, as before the optimizer's first step."""
    for own in (own for own in augmented.graph.all_weights() if own.trained):
        parts = [
            StatePart("main", p.name, tuple((0, size) for size in p.shape), torch.zeros(p.shape).flatten())
            for p in own.parameters
            if p.name != without
        ]
        write_shard(beside(folder_of(run_dir, step)) / own.name, 0, 0, parts)


def write_checkpoint(
    augmented: AugmentedGraph,
    run_dir: Path,
    step: int,
    every: int | None = None,
    without: str = "",
    seed: int = 1,
    lineage: Lineage | None = None,
) -> Path:
    """Write a finished checkpoint of a run; return its folder."""
    write_shards(augmented, run_dir, step, without)
    fingerprints = {own.name: {"model.norm.weight": 7} for own in augmented.graph.all_weights()}
    identity = run_identity(augmented.graph, seed, every)
    return finish(augmented.graph, augmented.plan, run_dir, step, identity, fingerprints, {}, lineage)
