"""Which runs are certainly lost: for every difference between the view of the worker that took one and of another."""

from dataclasses import replace

import pytest

from prefect_rlhf.blocks.lease_files import FileLock
from prefect_rlhf.blocks.worker import origin
from prefect_rlhf.blocks.worker.origin import Origin, why_uncertain

pytestmark = pytest.mark.quick


@pytest.fixture
def lock(tmp_path):
    """The lock of a run that was taken here, and that nobody holds any more."""
    taken = FileLock.take(tmp_path / "leases" / "runs" / "one.lock")
    yield taken
    taken.release()


@pytest.fixture(autouse=True)
def machine(monkeypatch, tmp_path):
    """A machine with an id, whatever this one has, and a disk of its own."""
    (tmp_path / "machine-id").write_text("machine-1\n")
    monkeypatch.setattr(origin, "MACHINE_ID", tmp_path / "machine-id")
    (tmp_path / "mounts").write_text(
        f"1 0 8:1 / / rw - nfs4 server:/ rw\n2 1 8:2 / {tmp_path} rw - ext4 /dev/sda2 rw\n"
    )
    monkeypatch.setattr(origin, "MOUNTS", tmp_path / "mounts")


@pytest.mark.parametrize(
    ("other", "why"),
    [
        ({}, ""),
        ({"processes": "pid:[1]"}, ""),  # a container that was started again, with the lock itself before it
        ({"machine": ""}, ""),
        ({"lock": "1:1"}, "its worker had another lease folder than"),  # a copy of the folder
        ({"attempt": "another"}, "its worker had another lease folder than"),
        ({"attempt": ""}, "a label of its origin is missing"),
        ({"boot": ""}, "a label of its origin is missing"),
        ({"boot": "before"}, ""),
        ({"boot": "before", "lock": "1:1", "processes": "pid:[1]"}, ""),  # numbers of another boot
        ({"boot": "before", "machine": "machine-2"}, "its worker ran in another boot, and its machine id"),
        ({"boot": "before", "machine": ""}, "its worker ran in another boot, and its machine id"),
        ({"boot": "before", "attempt": "another"}, "its worker had another lease folder than"),  # a clone
    ],
)
def test_a_run_is_lost_only_if_it_cannot_live_elsewhere(lock, other, why):
    taken = replace(Origin.leave(lock), **other)
    found = why_uncertain(Origin.of(taken.labels()), lock)
    assert found.startswith(why) and bool(found) == bool(why)


def test_a_shared_folder_does_not_prove_a_reboot(lock, monkeypatch, tmp_path):
    """Both may have the machine id of one image."""
    taken = replace(Origin.leave(lock), boot="before")
    (tmp_path / "mounts").write_text(
        f"1 0 8:1 / / rw - ext4 /dev/sda1 rw\n2 1 0:9 / {tmp_path} rw - nfs4 server:/ rw\n"
    )
    assert "machines may share" in why_uncertain(taken, lock)
    (tmp_path / "machine-id").unlink()
    taken = replace(Origin.leave(lock), boot="before")
    assert "machine id" in why_uncertain(taken, lock), "without an id no machine is the same"


def test_a_lock_taken_again_does_not_prove_a_loss(lock, tmp_path):
    """Its worker let go of it, in whichever order that is seen."""
    taken = Origin.leave(lock)
    lock.release()
    again = FileLock.take(lock.path)
    assert "another lease folder" in why_uncertain(taken, again)
    again.release()


def test_a_run_whose_labels_name_the_host_alone_is_left_alone(lock):
    host = Origin.leave(lock).host
    assert "label of its origin" in why_uncertain(Origin.of({"prefect-rlhf.host": host}), lock)
