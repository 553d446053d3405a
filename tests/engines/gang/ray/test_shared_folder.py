"""Markers tell whether machines write to one folder, on disk or at a store, and what is wrong where they do not."""

import pytest

from prefect_rlhf.engines.gang.ray.shared_folder import SharedFolder
from prefect_rlhf.files.remote_path import CACHE_VARIABLE, local_path
from tests.support.object_stores import gcs_emulator, names, point_s3_to, put, s3_emulator

MARKERS = ["one", "two"]


def test_machines_with_a_shared_folder_read_and_remove_markers(tmp_path):
    shared = SharedFolder.of(tmp_path)
    assert [shared.write(name) for name in MARKERS] == [None, None]
    assert shared.unread(MARKERS) is None
    shared.remove([*MARKERS, "never written"])
    assert not [*tmp_path.iterdir()]


def test_markers_of_another_disk_or_content_count_as_unread(tmp_path):
    shared = SharedFolder.of(tmp_path)
    assert shared.write("one") is None
    assert shared.unread(MARKERS) == ("two", "No such file or directory")
    (tmp_path / "two").write_text("of another run")
    assert shared.unread(MARKERS) == ("two", "expected its name as its content")


def test_missing_or_read_only_folder_is_reported(tmp_path):
    assert SharedFolder.of(tmp_path / "none").write("one") == "No such file or directory"
    (tmp_path / "file").write_text("")
    assert SharedFolder.of(tmp_path / "file").write("one") == "Not a directory"


@pytest.fixture(params=[s3_emulator, gcs_emulator], ids=["s3", "gs"])
def remote(request, monkeypatch, tmp_path):
    """The mirror of a run's folder in a bucket, in which a run has written before."""
    monkeypatch.setenv(CACHE_VARIABLE, str(tmp_path / "cache"))
    with request.param(monkeypatch) as url:
        put(f"{url}/runs/amber/metrics.jsonl", b"{}")
        yield local_path(f"{url}/runs/amber", "output_dir")


def test_machines_with_a_shared_store_read_and_remove_markers(remote, tmp_path):
    shared = SharedFolder.of(remote)
    assert shared.shown.endswith("://bucket/runs/amber")
    assert [shared.write(name) for name in MARKERS] == [None, None]
    assert names(shared.url) == ["metrics.jsonl", "one", "two"]
    assert shared.unread(MARKERS) is None
    shared.remove([*MARKERS, "never written"])
    assert names(shared.url) == ["metrics.jsonl"]
    assert not remote.exists(), "nothing stays on the machine's disk"


def test_a_marker_that_is_not_at_the_store_is_unread(remote):
    shared = SharedFolder.of(remote)
    assert shared.write("one") is None
    name, reason = shared.unread(MARKERS)
    assert name == "two" and reason.startswith("expected a path that exists")


def test_an_unreachable_store_is_reported_with_its_address(monkeypatch, tmp_path):
    monkeypatch.setenv(CACHE_VARIABLE, str(tmp_path))
    point_s3_to(monkeypatch, "http://127.0.0.1:9")
    shared = SharedFolder.of(local_path("s3://bucket/runs/amber", "output_dir"))
    assert "a store that answers at http://127.0.0.1:9" in shared.write("one")
    name, reason = shared.unread(["one"])
    assert name == "one" and "a store that answers at http://127.0.0.1:9" in reason
    shared.remove(["one"])


def test_a_machine_whose_mirrors_lie_elsewhere_is_found_out(monkeypatch, tmp_path):
    """What its ranks write into the controller's mirror would stay on its disk."""
    monkeypatch.setenv(CACHE_VARIABLE, str(tmp_path / "controller"))
    shared = SharedFolder.of(local_path("s3://bucket/runs/amber", "output_dir"))
    monkeypatch.setenv(CACHE_VARIABLE, str(tmp_path / "node"))
    assert CACHE_VARIABLE in shared.write("one")
