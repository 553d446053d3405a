"""Hugging Face folders from shards: nothing larger than a few tensors at a time, files of bounded size."""

from pathlib import Path

import megatron_cases as cases
import pytest
import torch
from checkpoint_cases import build_command
from megatron_cases import Case
from megatron_world import World
from safetensors.torch import load_file
from transformers import LlamaForCausalLM

from prefect_rlhf.engines.files.export import export
from prefect_rlhf.engines.files.huggingface import read_model_spec, write_folder
from prefect_rlhf.engines.megatron.engine import MegatronEngine
from prefect_rlhf.engines.weights.memory import release_free_memory

pytestmark = pytest.mark.slow
MIB = 1 << 20


def resident(line):
    """`VmRSS` or `VmHWM` (its highest since it was reset) of this process, in bytes."""
    status = dict(text.split(":") for text in Path("/proc/self/status").read_text().splitlines())
    return int(status[line].split()[0]) * 1024


def export_and_measure(rank, case, target):
    """Bytes of memory at the peak of an export beyond those before."""
    command = build_command(case)
    engine = MegatronEngine(command, rank)
    export(engine, command.model, command.layout, target / "warm", Path(case.folder), rank)  # first messages connect
    release_free_memory()
    Path("/proc/self/clear_refs").write_text("5")  # resets the peak
    before = resident("VmRSS")
    export(engine, command.model, command.layout, target / "made", Path(case.folder), rank)
    return resident("VmHWM") - before


@pytest.mark.all
def test_no_rank_holds_the_model_to_export_it(tmp_path):
    """Over 80 MiB on two ranks, in tensors of at most 2 MiB: the writer needs less than a quarter of it more."""
    folder = cases.make_folder(tmp_path / "source", layers=12, hidden=512, heads=16)
    case = Case(folder, ranks=(1, 0), tp=2)
    (tmp_path / "world").mkdir()
    world = World(2, str(tmp_path / "world"))
    try:
        extra = world.run(case.ranks, export_and_measure, case, tmp_path)
    finally:
        world.close()
    source, made = (load_file(path / "model.safetensors") for path in (tmp_path / "source", tmp_path / "made"))
    assert max(values.nbytes for values in source.values()) <= 2 * MIB
    assert sum(values.nbytes for values in source.values()) > 80 * MIB
    assert max(extra) < 20 * MIB
    assert source.keys() == made.keys()
    assert all(torch.equal(source[name], made[name]) for name in source)


def test_a_model_larger_than_a_file_may_be_is_several_that_transformers_and_we_read(tmp_path):
    folder = Path(cases.make_folder(tmp_path / "source", tied=False))
    spec, tensors = read_model_spec("actor", folder, "lm", dtype="float32"), load_file(folder / "model.safetensors")
    limit = max(values.nbytes for values in tensors.values()) * 2
    write_folder(tmp_path / "made", spec, reversed(tensors.items()), folder, limit)
    files = sorted((tmp_path / "made").glob("*.safetensors"))
    assert [file.name for file in files] == [
        f"model-{i + 1:05d}-of-{len(files):05d}.safetensors" for i in range(len(files))
    ]
    assert len(files) > 2
    assert all(sum(values.nbytes for values in load_file(file).values()) <= limit for file in files)
    assert read_model_spec("actor", tmp_path / "made", "lm", dtype="float32").shape == spec.shape
    loaded = LlamaForCausalLM.from_pretrained(tmp_path / "made").state_dict()
    assert all(torch.equal(loaded[name], values) for name, values in tensors.items())
