"""Checkpoints of the Megatron engine: written under one split, read under another, and training goes on."""

import json
import math
import shutil

import checkpoint_cases as work
import megatron_cases as cases
import numpy as np
import pytest
import torch
import two_heads
from family_cases import make_family
from megatron_cases import OPTIMIZER, Case
from safetensors.torch import load_file

from prefect_rlhf.engines.files.checkpoint_files import (
    StoredState,
    check_coverage,
    check_shard,
    part_key,
    read_index,
    shard_indexes,
)
from prefect_rlhf.errors.errors import InvalidInput
from prefect_rlhf.placement.models.weights import parameters
from tests.support.cases import combinations, first

pytestmark = pytest.mark.slow

LAYOUTS = {
    "one": {"ranks": (0,)},
    "dp2": {"ranks": (0, 1), "dp": 2},
    "dp3": {"ranks": (3, 1, 2), "dp": 3},
    "tp2": {"ranks": (0, 1), "tp": 2},
    "pp2": {"ranks": (3, 1), "pp": 2},
    "dp2 tp2": {"ranks": (3, 0, 2, 1), "dp": 2, "tp": 2},
    "dp2 pp2": {"ranks": (0, 2, 1, 3), "dp": 2, "pp": 2},
    "tp2 pp2": {"ranks": (1, 0, 3, 2), "tp": 2, "pp": 2},
}
PAIRS = [
    ("dp2 tp2", "one", "untied"),
    ("pp2", "dp2 tp2", "qwen3"),
    ("dp2 pp2", "tp2", "two heads"),
    ("dp2", "tp2", "tied"),
    ("tp2", "pp2", "tied"),
    ("one", "dp2 pp2", "tied"),
    ("dp2 pp2", "dp3", "tied"),
    ("tp2 pp2", "dp2 tp2", "scalar"),
    ("dp2 tp2", "pp2", "qwen2"),
    ("tp2", "dp2 pp2", "gemma3"),
]


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    root = tmp_path_factory.mktemp("models")
    return {
        "tied": cases.make_folder(root / "tied"),
        "untied": cases.make_folder(root / "untied", tied=False),
        "scalar": cases.make_folder(root / "scalar", scalar=True, layers=2, hidden=64, tied=False),
        "qwen2": make_family(root / "qwen2", "qwen2", 1),  # one key-value head, and copies of it under tp 2
        "qwen3": make_family(root / "qwen3", "qwen3", 1),
        "gemma3": make_family(root / "gemma3", "gemma3_text", 1),
        "two heads": two_heads.make_two_heads(root / "two", layers=2, hidden=64),
    }


def case_of(folders, kind, layout, dtype="float32"):
    head = {"scalar": "scalar", "two heads": "lm+scalar"}.get(kind, "lm")
    return Case(folders[kind], head=head, dtype=dtype, optimizer=OPTIMIZER, **LAYOUTS[layout])


def whole(found, case):
    return cases.assemble([weights for _, weights in found], {p.name: p.shape for p in parameters(case.spec())})


@pytest.mark.parametrize(
    ("layout", "dtype"),
    combinations(
        ("dp2", "tp2 pp2", "dp2 tp2"),
        ("float32", "bfloat16"),
        briefly=[("dp2 tp2", "bfloat16"), ("tp2 pp2", "float32")],
    ),
)
def test_under_the_same_split_training_goes_on_bit_for_bit(world, folders, tmp_path, layout, dtype):
    """Weights, metrics and norms, with the warm-up and Adam's bias corrections where they were; offloading between."""
    case = case_of(folders, "tied", layout, dtype)
    expected = world.run(case.ranks, work.train_save_train, case, tmp_path)
    found = world.run(case.ranks, work.load_train, case, tmp_path, True)
    for (metrics, weights), (other_metrics, others) in zip(expected, found, strict=True):
        assert metrics == other_metrics
        for name in weights:
            np.testing.assert_array_equal(weights[name][1], others[name][1], err_msg=name)


@pytest.mark.parametrize(("before", "after", "kind"), first(3, PAIRS))
def test_under_another_split_training_goes_on_within_rounding(world, folders, tmp_path, before, after, kind):
    saved, loaded = case_of(folders, kind, before), case_of(folders, kind, after)
    expected = world.run(saved.ranks, work.train_save_train, saved, tmp_path)
    found = world.run(loaded.ranks, work.load_train, loaded, tmp_path)
    assert found[0][0] == pytest.approx(expected[0][0], rel=1e-4)
    others = whole(found, loaded)
    for name, values in whole(expected, saved).items():
        np.testing.assert_allclose(others[name], values, rtol=0, atol=1e-5, err_msg=name)


def test_a_checkpoint_survives_another_split(world, folders, tmp_path):
    """Saved, loaded under another split and saved again: every element of weights and moments has the same bits."""
    first, second = tmp_path / "first", tmp_path / "second"
    saved, loaded = case_of(folders, "tied", "dp2 tp2", "bfloat16"), case_of(folders, "tied", "dp2 pp2", "bfloat16")
    world.run(saved.ranks, work.train_save_train, saved, first)
    world.run(loaded.ranks, work.load_save, loaded, first, second)
    assert all_elements(first, saved).keys() == all_elements(second, loaded).keys()
    for key, values in all_elements(first, saved).items():
        assert not np.isnan(values).any()
        np.testing.assert_array_equal(values, all_elements(second, loaded)[key], err_msg=str(key))


def all_elements(folder, case):
    """Whole tensors by kind and parameter; the names in the files say where each piece goes."""
    shapes = {p.name: p.shape for p in parameters(case.spec())}
    found = {(kind, name): np.full(shape, np.nan) for kind in work.KINDS for name, shape in shapes.items()}
    for key, values in work.stored_bits(folder).items():
        kind, name, spans = key.split(" ")
        place = tuple(slice(*map(int, span.split(":"))) for span in spans[1:-1].split(","))
        assert np.isnan(found[kind, name][place]).all(), f"{key} is stored twice"
        found[kind, name][place] = values
    return found


def test_compute_weights_are_the_main_weights_rounded(world, folders, tmp_path):
    saved, loaded = case_of(folders, "tied", "dp2", "bfloat16"), case_of(folders, "tied", "tp2 pp2", "bfloat16")
    world.run(saved.ranks, work.train_save_train, saved, tmp_path)
    assert world.run(loaded.ranks, work.main_weights, loaded, tmp_path) == [0.0] * 4


def test_a_checkpoint_before_the_first_update_has_no_moments(world, folders, tmp_path):
    """A step whose rows have no response changes nothing; a checkpoint after it is loaded all the same."""
    case = case_of(folders, "tied", "dp2")
    expected = world.run(case.ranks, work.train_save_train, case, tmp_path, False)
    assert {key.split()[0] for key in work.stored_bits(tmp_path)} == {"main"}
    found = world.run(case.ranks, work.load_train, case, tmp_path)
    assert found[0][0] == expected[0][0]


def test_a_copy_takes_12_bytes_a_parameter_in_memory_that_is_used_again(world, folders, tmp_path):
    """Of all ranks together, though each holds all weights; and it is on disk before the next one may be taken."""
    case = case_of(folders, "tied", "dp2")
    found = world.run(case.ranks, work.copies_in_turn, case, tmp_path)
    parameters_ = sum(math.prod(p.shape) for p in parameters(case.spec()))
    assert [sum(of_copy) for of_copy in zip(*(sizes for sizes, *_ in found), strict=True)] == [12 * parameters_] * 2
    for sizes, is_same_memory, room, said in found:
        assert is_same_memory and room == sizes[0]
        assert said == "actor.megatron n0:0 dp2: its last copy in host memory is not yet on disk"
    one, other = (work.stored_bits(tmp_path / number) for number in ("0", "1"))
    assert all(torch.equal(values, other[key]) for key, values in one.items())


@pytest.fixture(scope="module")
def stored(world, folders, tmp_path_factory):
    """A folder of two shards of weights."""
    folder, case = tmp_path_factory.mktemp("stored"), case_of(folders, "tied", "tp2")
    world.run(case.ranks, work.train_save_train, case, folder)
    return folder / "actor", {p.name: p.shape for p in parameters(case.spec())}


def copy_of(stored, tmp_path):
    return shutil.copytree(stored[0], tmp_path / "actor")


def check(folder, shapes):
    """What the controller and the ranks check before anything is built."""
    indexes = shard_indexes(folder)
    check_coverage("actor", [read_index(index, "actor") for index in indexes], shapes)
    for index in indexes:
        check_shard(index, "actor")


def test_a_written_checkpoint_passes_all_checks(stored):
    check(*stored)


def test_a_flipped_bit_is_named_with_file_role_and_parameter(stored, tmp_path):
    """Wherever it is: here in the middle of a moment."""
    folder = copy_of(stored, tmp_path)
    file, key = folder / "shard-00001.safetensors", part_key("exp_avg", "model.norm.weight", ((0, 128),))
    file = file if key in load_file(file) else folder / "shard-00000.safetensors"
    flip_bit(file, key)
    with pytest.raises(InvalidInput, match=rf"checkpoint\.actor: .*exp_avg model\.norm\.weight.*{file.name}") as error:
        check(folder, stored[1])
    assert "\n" not in str(error.value)


def flip_bit(file, key):
    content = bytearray(file.read_bytes())
    length = int.from_bytes(content[:8], "little")
    start = json.loads(content[8 : 8 + length])[key]["data_offsets"][0]
    content[8 + length + start + 2] ^= 1
    file.write_bytes(content)


@pytest.mark.parametrize(
    ("damage", "says"),
    [
        (lambda folder: (folder / "shard-00001.safetensors").unlink(), r"no file .*shard-00001\.safetensors.*model\."),
        (lambda folder: (folder / "shard-00001.json").unlink(), r"\d+ elements of main model\."),
        (lambda folder: (folder / "shard-00001.json").write_text("{"), r"shard-00001\.json, which is not an index"),
        (lambda folder: cut(folder / "shard-00001.safetensors"), r"shard-00001\.safetensors of \d+ bytes.*model\."),
        (lambda folder: (folder / "shard-00000.safetensors").write_bytes(garbage(folder)), "not open"),
    ],
)
def test_a_missing_or_broken_shard_is_named_in_one_line(stored, tmp_path, damage, says):
    folder = copy_of(stored, tmp_path)
    damage(folder)
    with pytest.raises(InvalidInput, match=says) as error:
        check(folder, stored[1])
    assert str(error.value).startswith("checkpoint.actor: ") and "\n" not in str(error.value)


def cut(file):
    file.write_bytes(file.read_bytes()[:-100])


def garbage(folder):
    """As long as the shard, and no safetensors file."""
    return b"\xff" * (folder / "shard-00000.safetensors").stat().st_size


def test_reading_more_than_is_stored_is_refused(stored, tmp_path):
    folder = copy_of(stored, tmp_path)
    for file in folder.glob("shard-00001.*"):
        file.unlink()
    with pytest.raises(InvalidInput, match=r"elements of main model\.embed_tokens\.weight"):
        StoredState(folder).read("main", "model.embed_tokens.weight", ((0, 480), (0, 128)))
    assert torch.isfinite(StoredState(stored[0]).read("main", "model.embed_tokens.weight", ((0, 480), (5, 9)))).all()
