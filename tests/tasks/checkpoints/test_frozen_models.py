"""A resume with another base is refused by a few matrices, as they are stored and in four bits."""

import shutil
from dataclasses import replace

import pytest
import torch.distributed as dist
from safetensors.torch import load_file, save_file

from prefect_rlhf.engines.commands import BuildCommand
from prefect_rlhf.engines.megatron.engine import MegatronEngine
from prefect_rlhf.engines.weights.fingerprint import digest
from prefect_rlhf.errors.errors import InvalidInput
from prefect_rlhf.flows.dpo import dpo
from prefect_rlhf.placement.devices.mesh import ClusterShape, DeviceMesh
from prefect_rlhf.placement.devices.strategy import Strategy
from prefect_rlhf.placement.layout.layout import Layout
from prefect_rlhf.placement.plan import ModelInstance
from prefect_rlhf.tasks.checkpoints.folders import checkpoint_in
from prefect_rlhf.tasks.checkpoints.frozen_models import check_frozen_models
from tests.support.finished_steps import write_checkpoint
from tests.support.runs import prepared, whole
from tests.support.tiny import make_model, make_pairs

ONE_DEVICE = whole(ClusterShape("desk", 1, 1, 8 << 30))


@pytest.fixture(scope="module", autouse=True)
def no_world_is_left():
    """The engine here makes a world of one rank; other files' tests begin without."""
    yield
    if dist.is_initialized():
        dist.destroy_process_group()


@pytest.fixture(params=[None, "nf4"])
def given(request, tmp_path):
    """DPO of an adapter, whose reference is the base."""
    pairs = {"path": make_pairs(tmp_path / "pairs.parquet")}
    ref = {"path": make_model(tmp_path / "base"), "dtype": "bfloat16"}
    actor = ref | {"adapter": {"rank": 2}, "base_dtype": request.param}
    given = {"pairs": pairs, "held_out": pairs | {"split": "held_out"}, "actor": actor, "ref": ref}
    return given | {"algo": {"batch_size": 4}, "output_dir": str(tmp_path / "runs"), "checkpoint_every": 1}


def fingerprint(spec):
    """Of a model as an engine builds it."""
    instance = ModelInstance(spec.role, "megatron", DeviceMesh(0, 1, 0, 1), Strategy())
    engine = MegatronEngine(BuildCommand(spec, instance, (0,), Layout({}, {}), 64, 8), 0)
    return digest(engine.weights())


def test_another_base_is_refused_before_it_is_built_and_a_copy_is_not(given, tmp_path):
    """By a matrix of its first layer or of its last. In four bits these are quantised as an engine does."""
    before = prepared(dpo, given, ONE_DEVICE)
    written = checkpoint_in(write_checkpoint(before.augmented, tmp_path / "run", 1))
    (trunk,) = before.request.graph.weights("ref")  # named after a role, by which the error names it
    found = {trunk.name: fingerprint(before.request.graph.model("ref"))}
    checkpoint = replace(written, manifest=replace(written.manifest, fingerprints=found))
    for name, changed in (("first", "layers.0."), ("last", "layers.1."), ("copy", "none")):
        folder = shutil.copytree(given["ref"]["path"], tmp_path / name)
        weights = load_file(folder / "model.safetensors")
        weights |= {key: value.flip(0) for key, value in weights.items() if changed in key}
        save_file(weights, folder / "model.safetensors", {"format": "pt"})
        other = given | {role: given[role] | {"path": str(folder)} for role in ("ref", "actor")}
        graph = prepared(dpo, other, ONE_DEVICE).request.graph
        if name == "copy":
            check_frozen_models(checkpoint, graph)
        else:
            with pytest.raises(InvalidInput, match=r"other weights of (ref|actor)', expected the weights in ") as error:
                check_frozen_models(checkpoint, graph)
            assert "\n" not in str(error.value)


def test_a_resume_with_another_format_of_the_base_is_refused_in_one_line(given, tmp_path):
    """Whichever of both had four bits."""
    before = prepared(dpo, given, ONE_DEVICE)
    folder = write_checkpoint(before.augmented, tmp_path / "run", 1, lineage=before.request.lineage)
    had = given["actor"]["base_dtype"]
    other = given["actor"] | {"base_dtype": None if had else "nf4"}
    expected = rf"^actor\.base_dtype: got {other['base_dtype']!r}, expected {had!r}, as in the checkpoint step-000001$"
    with pytest.raises(InvalidInput, match=expected):
        prepared(dpo, given | {"actor": other, "resume_from": str(folder)}, ONE_DEVICE)
