"""Checkpoints in a bucket: what was finished is found from any machine, and nothing else is."""

import shutil
import subprocess
import sys
from contextlib import contextmanager

import pytest

from prefect_rlhf.errors.errors import InvalidInput
from prefect_rlhf.files.remote_path import CACHE_VARIABLE, local_path
from prefect_rlhf.files.storage.publish import withdraw
from prefect_rlhf.tasks.checkpoints.elsewhere import publish, writing_to
from prefect_rlhf.tasks.checkpoints.folders import (
    MANIFEST,
    checkpoint_in,
    clear_unfinished,
    folder_of,
    keep_newest,
    newest_checkpoint,
    newest_finished,
)
from tests.support.finished_steps import write_checkpoint
from tests.support.object_stores import names, s3_emulator
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


def test_latest_is_the_stores_newest_checkpoint_whatever_this_machine_has(runs, tmp_path):
    write(runs / "amber", 2)
    write(runs / "amber", 4)
    half = write(runs / "amber", 6)
    shutil.rmtree(tmp_path / "cache")
    assert newest_checkpoint(runs).step == 6
    withdraw(half / MANIFEST)
    assert newest_checkpoint(runs).step == 4, "what the store does not have is forgotten here"
    shutil.rmtree(tmp_path / "cache")
    assert checkpoint_in(local_path("s3://bucket/runs/amber", "resume_from")).step == 4
    assert checkpoint_in(local_path("s3://bucket/runs/amber/checkpoints/step-000002", "resume_from")).step == 2


WRITER = """
import sys
from pathlib import Path
from prefect_rlhf.tasks.checkpoints.elsewhere import writing_to

with writing_to(Path(sys.argv[1])):
    print("holds it", flush=True)
    sys.stdin.read()
"""


@contextmanager
def written_by_another_process(run_dir):
    """A process that writes a run's folder, until it is killed."""
    writer = subprocess.Popen(
        [sys.executable, "-c", WRITER, str(run_dir)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    try:
        assert writer.stdout.readline() == b"holds it\n"
        yield
    finally:
        writer.kill()
        writer.communicate()


@pytest.mark.parametrize(
    "find",
    [newest_checkpoint, lambda runs: checkpoint_in(runs / "amber")],
    ids=["latest", "the run's folder"],
)
def test_a_live_run_keeps_files_that_the_store_lacks(runs, find):
    """Between the rename of a checkpoint and the upload of its manifest another run asks what there is."""
    write(runs / "amber", 2)
    (runs / "amber" / "metrics.jsonl").write_text("step 1\n")
    publish(runs / "amber" / "metrics.jsonl")
    write_checkpoint(augmented(), runs / "amber", 4)
    withdraw(folder_of(runs / "amber", 4) / MANIFEST)
    (runs / "amber" / "metrics.jsonl").write_text("step 1\nstep 2\nstep 3\nstep 4\n")
    with written_by_another_process(runs / "amber"):
        assert find(runs).step == 4
        assert (folder_of(runs / "amber", 4) / MANIFEST).is_file()
        assert (runs / "amber" / "metrics.jsonl").read_text().count("\n") == 4
    assert find(runs).step == 2, "its process was killed: the store says what there is"


def test_a_runs_second_process_does_not_write_its_folder(runs, monkeypatch):
    monkeypatch.setattr("prefect_rlhf.files.storage.live.WAIT_SECONDS", 0.2)
    with written_by_another_process(runs / "amber"):
        with (
            pytest.raises(
                InvalidInput, match="output_dir: got 's3://bucket/runs/amber', expected a folder that no oth"
            ),
            writing_to(runs / "amber"),
        ):
            pass
        with writing_to(runs / "brown"):
            pass
    with writing_to(runs / "amber"):
        pass


def test_a_folder_without_a_finished_checkpoint_is_refused_with_its_remote_path(runs):
    with pytest.raises(InvalidInput, match="resume_from: got 'latest', expected a run in s3://bucket/runs"):
        newest_checkpoint(runs)
    with pytest.raises(InvalidInput, match="resume_from: got 's3://bucket/runs/amber', expected the folder of a run"):
        checkpoint_in(local_path("s3://bucket/runs/amber", "resume_from"))


def test_old_and_unfinished_checkpoints_are_deleted_at_the_store_too(runs):
    for step in (2, 4, 6):
        write(runs / "amber", step)
    keep_newest(runs / "amber", 1)
    assert {name.split("/")[0] for name in names("s3://bucket/runs/amber/checkpoints")} == {"step-000006"}
    shard = folder_of(runs / "amber", 8) / "actor.trunk" / "shard-00000.json"
    shard.parent.mkdir(parents=True)
    shard.write_text("{}")
    publish(shard)
    clear_unfinished(runs / "amber")
    assert {name.split("/")[0] for name in names("s3://bucket/runs/amber/checkpoints")} == {"step-000006"}
    assert newest_finished(runs / "amber") == folder_of(runs / "amber", 6)
