"""Checkpoints as folders: which one is meant, what is kept, and what damage or a full disk leaves of them."""

import errno
import json
import os
import shutil

import pytest

from prefect_rlhf.errors.errors import InvalidInput
from prefect_rlhf.placement.augmented.augment import augment
from prefect_rlhf.placement.devices.mesh import ClusterShape
from prefect_rlhf.placement.planner.preset_plan import preset
from prefect_rlhf.tasks.checkpoints import folders as checkpoints
from prefect_rlhf.tasks.checkpoints.folders import (
    FORMAT,
    check_resumable,
    checkpoint_in,
    folder_of,
    keep_newest,
    newest_checkpoint,
)
from prefect_rlhf.tasks.checkpoints.run_identity import run_identity
from tests.support.finished_steps import write_checkpoint, write_shards
from tests.support.strategies import GIB, ppo
from tests.tasks import row_world

ONE = ClusterShape("one", 1, 1, 8 * GIB)


def augmented(staleness=0):
    graph = row_world.with_operations(ppo(staleness=staleness))
    return augment(graph, preset("flattening", graph, ONE, ONE.whole), num_steps=9)


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    return write_checkpoint(augmented(), tmp_path_factory.mktemp("written") / "run", 2)


@pytest.fixture
def run_dir(written, tmp_path):
    """A run with the checkpoint of two steps."""
    shutil.copytree(written, folder_of(tmp_path / "run", 2))
    return tmp_path / "run"


def test_latest_is_the_newest_finished_checkpoint_of_all_runs(written, tmp_path):
    """Not what has the most steps; `latest` the link is no run."""
    for name, step, at in (("amber", 8, 100), ("brown", 2, 300), ("cyan", 4, 200)):
        folder = shutil.copytree(written, folder_of(tmp_path / name, step))
        os.utime(folder / "checkpoint.json", (at, at))
    (tmp_path / "latest").symlink_to("amber")
    (tmp_path / "notes.txt").touch()
    assert newest_checkpoint(tmp_path).folder == folder_of(tmp_path / "brown", 2)
    shutil.rmtree(tmp_path / "brown")
    assert newest_checkpoint(tmp_path).folder == folder_of(tmp_path / "cyan", 4)


def test_a_damaged_old_run_does_not_hinder_latest(run_dir, tmp_path):
    broken = folder_of(tmp_path / "old", 9)
    shutil.copytree(folder_of(run_dir, 2), broken)
    (broken / "checkpoint.json").write_text("{")
    os.utime(broken / "checkpoint.json", (1, 1))
    assert newest_checkpoint(tmp_path).folder == folder_of(run_dir, 2)


def test_a_run_folder_means_its_newest_checkpoint(run_dir, tmp_path):
    newest = shutil.copytree(folder_of(run_dir, 2), folder_of(run_dir, 10))
    assert checkpoint_in(run_dir).folder == newest
    assert checkpoint_in(folder_of(run_dir, 2)).folder == folder_of(run_dir, 2)


@pytest.mark.parametrize(
    ("named", "says"),
    [
        ("latest", r"resume_from: got 'latest', expected a run in .* that finished a checkpoint"),
        ("nowhere", r"resume_from: got '.*nowhere', expected the folder of a run or of a checkpoint, or 'latest'"),
        ("empty", r"resume_from: got '.*empty', expected a folder with a finished checkpoint"),
        ("file", r"resume_from: got '.*file', expected the folder of a run or of a checkpoint, or 'latest'"),
        (
            "empty/checkpoints/step-000004.part",
            r"resume_from: got '.*part', expected a finished checkpoint; the writing of this folder was interrupted",
        ),
    ],
)
def test_a_folder_without_a_checkpoint_is_refused_in_one_line(tmp_path, named, says):
    """A folder whose writing was cut short is none, whatever is in it."""
    write_shards(augmented(), tmp_path / "empty", 4)
    (tmp_path / "file").touch()
    with pytest.raises(InvalidInput, match=says) as error:
        newest_checkpoint(tmp_path) if named == "latest" else checkpoint_in(tmp_path / named)
    assert "\n" not in str(error.value)


def tampered(file, old, new):
    text = file.read_text()
    assert old in text
    file.write_text(text.replace(old, new, 1))


@pytest.mark.parametrize(
    ("damage", "says"),
    [
        (lambda f: (f / "checkpoint.json").write_text("{}"), r"resume_from: .*an unreadable .*checkpoint\.json"),
        (lambda f: tampered(f / "checkpoint.json", '"step": 2', '"step": 3'), r"other content of .*checkpoint\.json"),
        (
            lambda f: (f / "actor.trunk" / "shard-00000.json").unlink(),
            r"checkpoint\.actor\.trunk: .*no file .*shard-00000\.json",
        ),
        (
            lambda f: tampered(f / "critic.trunk" / "shard-00000.json", '"num_updates": 0', '"num_updates": 1'),
            r"checkpoint\.critic\.trunk: .*other content of .*critic\.trunk/shard-00000\.json",
        ),
        (
            lambda f: (f / "critic.scalar_head" / "shard-00000.safetensors").unlink(),
            r"checkpoint\.critic\.scalar_head: .*no file .*head/shard-00000\.safetensors \(of score\.weight\)",
        ),
    ],
)
def test_a_changed_checkpoint_is_refused_when_it_is_found(run_dir, tmp_path, damage, says):
    damage(folder_of(run_dir, 2))
    with pytest.raises(InvalidInput, match=says) as error:
        checkpoint_in(run_dir)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("header", "author"),
    [
        ({}, "prefect-rlhf 0.1.0 without a format number"),
        ({"format": FORMAT + 1, "written_by": "prefect-rlhf 9.1"}, "prefect-rlhf 9.1"),
    ],
)
def test_a_checkpoint_in_another_format_is_refused_with_a_remedy(run_dir, tmp_path, header, author):
    """The first format had no number; what its manifest holds is not looked at."""
    manifest = folder_of(run_dir, 2) / "checkpoint.json"
    stored = json.loads(manifest.read_text())
    assert stored["format"] == FORMAT and stored["written_by"].startswith("prefect-rlhf ")
    manifest.write_text(json.dumps({"manifest": stored["manifest"], "checksum": stored["checksum"], **header}))
    with pytest.raises(InvalidInput) as error:
        checkpoint_in(run_dir)
    assert str(error.value) == (
        f"resume_from: got '{manifest}, written by {author}', expected a checkpoint of format {FORMAT}; finish the run "
        "with that version, or start a new run from the Hugging Face folders that it exports after its last step"
    )


def test_a_runs_identity_has_operations_by_name():
    """Not by the modules that define them, which may move."""
    identity = run_identity(augmented().graph, 1, None)
    assert identity["calls"]["advantages"]["operation"] == {"name": "check_columns", "settings": {}}
    assert "row_world" not in json.dumps(identity)


def test_a_checkpoint_that_lacks_a_parameter_is_never_finished(run_dir):
    with pytest.raises(InvalidInput, match=r"checkpoint\.actor\.trunk: got '0 elements of main model\.norm\.weight'"):
        write_checkpoint(augmented(), run_dir, 4, without="model.norm.weight")
    assert checkpoints.newest_finished(run_dir) == folder_of(run_dir, 2)


def test_a_full_disk_while_finishing_keeps_the_previous_checkpoint(run_dir, monkeypatch):
    def full(*_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(checkpoints, "write_json", full)
    with pytest.raises(OSError, match="No space"):
        write_checkpoint(augmented(), run_dir, 4)
    assert checkpoint_in(run_dir).step == 2


@pytest.mark.parametrize("number", [1, 2])
def test_the_newest_checkpoints_are_kept(run_dir, number):
    for step in (4, 6):
        shutil.copytree(folder_of(run_dir, 2), folder_of(run_dir, step))
    keep_newest(run_dir, number)
    kept = sorted(path.name for path in (run_dir / "checkpoints").iterdir())
    assert kept == ["step-000002", "step-000004", "step-000006"][-number:]


def test_a_kill_while_deleting_leaves_no_partial_checkpoint(run_dir, monkeypatch):
    """By any name that something reads."""
    shutil.copytree(folder_of(run_dir, 2), folder_of(run_dir, 4))

    def stop(folder):
        (folder / "checkpoint.json").unlink()
        raise KeyboardInterrupt

    monkeypatch.setattr(shutil, "rmtree", stop)
    with pytest.raises(KeyboardInterrupt):
        keep_newest(run_dir, 1)
    assert sorted(path.name for path in (run_dir / "checkpoints").iterdir()) == ["step-000002.part", "step-000004"]


@pytest.mark.parametrize(("staleness", "accepted"), [(0, True), (1, False)])
def test_with_staleness_the_checkpoint_interval_is_part_of_the_identity(tmp_path, staleness, accepted):
    """Checkpoints then decide which weights are read."""
    write_checkpoint(augmented(staleness), tmp_path / "run", 4, every=2)
    found, graph = newest_checkpoint(tmp_path), augmented(staleness).graph
    check_resumable(found, graph, run_identity(graph, 1, 2), 9, has_ended=True)
    if accepted:
        check_resumable(found, graph, run_identity(graph, 1, 3), 9, has_ended=True)
    else:
        with pytest.raises(InvalidInput, match="'a checkpoint with checkpoint_every 2', expected 3, as in this run"):
            check_resumable(found, graph, run_identity(graph, 1, 3), 9, has_ended=True)


def test_a_manifest_is_plain_json(written):
    content = json.loads((written / "checkpoint.json").read_text())
    assert content["manifest"]["step"] == 2 and content["manifest"]["fingerprints"].keys() >= {
        "actor.trunk",
        "critic.trunk",
        "critic.scalar_head",
        "ref.trunk",
        "reward.trunk",
        "reward.scalar_head",
    }
