"""What ranks do with checkpoints in tests: train, save, load under another split, train on."""

from pathlib import Path

import torch
from megatron_cases import Case, Walk, held, loss, make_rows, part, replica_rows, train_on
from safetensors.torch import load_file

from prefect_rlhf.engines.commands import BuildCommand, Restore
from prefect_rlhf.engines.files.training_state import HostCopy, restore
from prefect_rlhf.engines.megatron.engine import MegatronEngine
from prefect_rlhf.errors.errors import RlhfError
from prefect_rlhf.placement.devices.mesh import DeviceMesh
from prefect_rlhf.placement.devices.strategy import Strategy
from prefect_rlhf.placement.plan import ModelInstance
from tests.support.layouts import megatron_layout

KINDS = ("main", "exp_avg", "exp_avg_sq")


def build_command(case: Case, restored: Path | None = None) -> BuildCommand:
    strategy = Strategy(case.dp, case.tp, case.pp)
    instance = ModelInstance("actor", "megatron", DeviceMesh(0, 1, 0, 1), strategy)
    layout = megatron_layout(case.spec(), strategy, case.ranks)
    where = Restore(restored, 1) if restored else None
    return BuildCommand(case.spec(), instance, case.ranks, layout, 128, 64, restore=where)


def train_once(engine: MegatronEngine, case: Case, rank: int, seed: int):
    """Two optimizer steps; other rows for another seed."""
    settings = Walk("values" if case.head == "scalar" else "logprobs", mini_batches=2)
    rows = replica_rows(24, case.dp, 2)[case.replica(rank)]
    return train_on(engine, *part(*make_rows(24, seed), rows), loss, settings)


def train_save_train(rank: int, case: Case, folder: Path, updates: bool = True):
    """Metrics and weights after training, copying and training on; what was copied is written only then."""
    command = build_command(case)
    engine, copy = MegatronEngine(command, rank), HostCopy(command, rank)
    if updates:
        train_once(engine, case, rank, seed=1)
    copy.take(engine)
    metrics = train_once(engine, case, rank, seed=2)
    copy.write(folder)
    return metrics, held(engine)


def copies_in_turn(rank: int, case: Case, folder: Path):
    """Bytes of two copies, and whether they lie in the same memory; words of a third one, taken too early."""
    command = build_command(case)
    engine, copy = MegatronEngine(command, rank), HostCopy(command, rank)
    train_once(engine, case, rank, seed=1)
    sizes, places = [], []
    for number in range(2):
        sizes.append(copy.take(engine))
        places.append(copy._room.data_ptr())
        copy.write(folder / str(number))
    copy.take(engine)
    try:
        copy.take(engine)
    except RlhfError as error:
        return sizes, len(set(places)) == 1, len(copy._room), str(error)
    return None


def load_train(rank: int, case: Case, folder: Path, offload: bool = False):
    """The same from the folder."""
    engine = MegatronEngine(build_command(case, folder), rank)
    restore(engine, [folder / "actor"])
    if offload:
        engine.offload("all")
        engine.reload("all")
    return train_once(engine, case, rank, seed=2), held(engine)


def main_weights(rank: int, case: Case, folder: Path):
    """How far compute weights are from the main weights rounded, after a load: nothing."""
    engine = MegatronEngine(build_command(case, folder), rank)
    restore(engine, [folder / "actor"])
    views = {name: (shard.region, shard.view.reshape(shard.shape)) for name, shard in engine.weights().items()}
    worst = 0.0
    for piece in engine.state_parts():
        if piece.kind == "main":
            region, whole = views[piece.parameter]
            axes = zip(piece.region, region, strict=True)
            inside = tuple(slice(start - first, stop - first) for (start, stop), (first, _) in axes)
            rounded = piece.values.to(whole.dtype).view(whole[inside].shape)
            worst = max(worst, float((rounded.float() - whole[inside].float()).abs().max()))
    return worst


def stored_bits(folder: Path) -> dict[str, torch.Tensor]:
    """Every tensor of every shard in a folder and below it."""
    return {key: value for file in sorted(folder.glob("**/*.safetensors")) for key, value in load_file(file).items()}


def load_save(rank: int, case: Case, folder: Path, target: Path):
    """Load and save again, with nothing between."""
    command = build_command(case, folder)
    engine = MegatronEngine(command, rank)
    restore(engine, [folder / "actor"])
    copy = HostCopy(command, rank)
    copy.take(engine)
    copy.write(target)
