"""What a run writes elsewhere is whole at the store or not there, whenever the writing is cut off."""

import pytest

from prefect_rlhf.errors.errors import InvalidInput, OutputFailed
from prefect_rlhf.files.remote_path import local_path
from prefect_rlhf.files.storage import publish as module
from prefect_rlhf.files.storage.publish import check_writable, publish, withdraw
from tests.support.object_stores import names, point_s3_to


@pytest.fixture
def folder(bucket):
    """The mirror of a folder, with three files that were written here."""
    folder = local_path(f"{bucket}/runs/actor", "output_dir")
    (folder / "deep").mkdir(parents=True)
    for name in ("config.json", "deep/a.bin", "z.bin"):
        (folder / name).write_text(name)
    return folder


def test_a_folder_is_sent_with_all_below_it_and_withdrawn_with_all_below_it(bucket, folder):
    publish(folder, last="config.json")
    assert names(f"{bucket}/runs") == ["actor/config.json", "actor/deep/a.bin", "actor/z.bin"]
    withdraw(folder, first="config.json")
    assert names(f"{bucket}/runs") == []
    withdraw(folder, first="config.json")


@pytest.mark.parametrize("allowed", [0, 1, 2])
def test_an_interrupted_upload_lacks_its_last_file(bucket, folder, monkeypatch, allowed):
    """Also where an earlier one of its name was: half new and half old is no folder."""
    publish(folder, last="config.json")
    upload, sent = module._upload, []

    def cut_off(store, file, name):
        if len(sent) == allowed:
            raise OSError("the network is gone")
        sent.append(name)
        upload(store, file, name)

    monkeypatch.setattr(module, "_upload", cut_off)
    with pytest.raises(OutputFailed, match="runs/actor cannot be written: .*the network is gone"):
        publish(folder, last="config.json")
    assert "config.json" not in names(f"{bucket}/runs/actor")


def test_what_lies_in_no_mirror_is_sent_nowhere(tmp_path):
    (tmp_path / "file").write_text("here")
    assert publish(tmp_path) == 0
    withdraw(tmp_path)
    assert (tmp_path / "file").read_text() == "here"


def test_a_store_where_a_file_can_be_written_is_left_as_it_was(bucket):
    check_writable(f"{bucket}/runs")
    assert names(f"{bucket}/runs") == []


def test_a_bucket_that_is_not_there_cannot_be_written(s3):
    with pytest.raises(InvalidInput, match="output_dir: got 's3://nobody/runs', expected an existing bucket"):
        check_writable("s3://nobody/runs")


def test_a_lost_store_gives_one_line_and_a_restart_may_help(s3, monkeypatch):
    file = local_path(f"{s3}/runs/metrics.jsonl", "output_dir")
    file.parent.mkdir(parents=True)
    file.write_text("{}")
    point_s3_to(monkeypatch, "http://127.0.0.1:9")
    with pytest.raises(OutputFailed, match="s3://bucket/runs/metrics.jsonl cannot be written: expected a store"):
        publish(file)
