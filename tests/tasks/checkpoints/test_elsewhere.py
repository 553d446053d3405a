"""Checkpoints in a bucket: what was finished is found from any machine, and nothing else is."""

import shutil

import pytest

from prefect_rlhf.engines.storage.publish import withdraw
from prefect_rlhf.placement.errors import InvalidInput
from prefect_rlhf.placement.remote_path import CACHE_VARIABLE, local_path
from prefect_rlhf.tasks.checkpoints.elsewhere import publish
from prefect_rlhf.tasks.checkpoints.folders import (
    MANIFEST,
    clear_unfinished,
    find_checkpoint,
    folder_of,
    keep_newest,
    newest_finished,
)
from tests.finished_steps import write_checkpoint
from tests.object_stores import names, s3_emulator
from tests.tasks.checkpoints.test_checkpoint_folders import augmented


@pytest.fixture
def runs(tmp_path, monkeypatch):
    """The mirror of a folder of runs in an empty bucket."""
    monkeypatch.setenv(CACHE_VARIABLE, str(tmp_path / "cache"))
    with s3_emulator(monkeypatch) as url:
        yield local_path(f"{url}/runs", "output_dir")


def write(run_dir, step):
    """A finished checkpoint at the store too, as ranks and controller write it."""
    write_checkpoint(augmented(), run_dir, step)
    folder = folder_of(run_dir, step)
    publish(folder, last=MANIFEST)
    return folder


def test_latest_is_the_newest_finished_one_at_the_store_whatever_this_machine_has(runs, tmp_path):
    write(runs / "amber", 2)
    write(runs / "amber", 4)
    half = write(runs / "amber", 6)
    shutil.rmtree(tmp_path / "cache")
    assert find_checkpoint("latest", runs).step == 6
    withdraw(half / MANIFEST)
    assert find_checkpoint("latest", runs).step == 4, "what the store does not have is forgotten here"
    shutil.rmtree(tmp_path / "cache")
    assert find_checkpoint("s3://bucket/runs/amber", runs).step == 4
    assert find_checkpoint("s3://bucket/runs/amber/checkpoints/step-000002", runs).step == 2


def test_a_folder_without_a_finished_checkpoint_is_refused_with_its_remote_path(runs):
    with pytest.raises(InvalidInput, match="resume_from: got 'latest', expected a run in s3://bucket/runs"):
        find_checkpoint("latest", runs)
    with pytest.raises(InvalidInput, match="resume_from: got 's3://bucket/runs/amber', expected the folder of a run"):
        find_checkpoint("s3://bucket/runs/amber", runs)


def test_what_is_too_old_goes_at_the_store_too_and_what_was_never_finished_as_well(runs):
    for step in (2, 4, 6):
        write(runs / "amber", step)
    keep_newest(runs / "amber", 1)
    assert {name.split("/")[0] for name in names("s3://bucket/runs/amber/checkpoints")} == {"step-000006"}
    shard = folder_of(runs / "amber", 8) / "actor" / "shard-00000.json"
    shard.parent.mkdir(parents=True)
    shard.write_text("{}")
    publish(shard)
    clear_unfinished(runs / "amber")
    assert {name.split("/")[0] for name in names("s3://bucket/runs/amber/checkpoints")} == {"step-000006"}
    assert newest_finished(runs / "amber") == folder_of(runs / "amber", 6)
