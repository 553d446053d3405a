"""Leases: what real processes may hold at the same time, and what a dead one still holds."""

import json
import multiprocessing
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from prefect_rlhf.blocks.lease import LeaseTimeout, lease
from prefect_rlhf.blocks.lease_book import Busy, Holder, LeaseBook, LeasedMesh
from prefect_rlhf.blocks.worker.claimed_run import TakenRun
from prefect_rlhf.blocks.worker.configuration import GpuMeshConfiguration, RunFacts
from prefect_rlhf.errors.errors import DeviceOutsideLease, InvalidInput
from prefect_rlhf.placement.devices.lease import Lease
from prefect_rlhf.placement.devices.mesh import ClusterShape, Device, DeviceMesh

GIB = 1 << 30
DESK = ClusterShape("desk", 1, 2, GIB)
NODE = ClusterShape("node", 1, 8, GIB)
RACK = ClusterShape("rack", 3, 4, GIB)
ME = Holder("id-1", "ppo/amber-fox", 1, "2026-01-01T10:32:00")


@given(wants=st.lists(st.tuples(st.sampled_from([1, 2, 4, 8, 12]), st.booleans()), max_size=12))
def test_no_device_is_held_twice_and_no_free_mesh_is_refused(tmp_path_factory, wants):
    """For any sequence of acquire and release: held meshes are disjoint and legal; Busy only when none fits."""
    book = LeaseBook(tmp_path_factory.mktemp("leases"), RACK)
    held: list[LeasedMesh] = []
    for size, release_oldest in wants:
        if release_oldest and held:
            held.pop(0).release()
        taken = {device for one in held for device in one.mesh.devices()}
        answer = book.acquire(size, ME)
        if isinstance(answer, Busy):
            assert all(set(mesh).intersection(taken) for mesh in _meshes_by_hand(size))
        else:
            assert taken.isdisjoint(answer.mesh.devices())
            assert tuple(answer.mesh.devices()) in _meshes_by_hand(size)
            held.append(answer)
    for one in held:
        one.release()


def _meshes_by_hand(size):
    """Every legal mesh of RACK with `size` devices, written out without the subject's arithmetic."""
    nodes = [[Device(node, index) for index in range(4)] for node in range(3)]
    slices = {1: [[0], [1], [2], [3]], 2: [[0, 1], [2, 3]], 4: [[0, 1, 2, 3]]}
    if size in slices:
        return [tuple(node[index] for index in part) for node in nodes for part in slices[size]]
    return {8: [tuple(nodes[0] + nodes[1]), tuple(nodes[1] + nodes[2])], 12: [tuple(sum(nodes, []))]}[size]


def test_small_leases_leave_large_blocks_whole(tmp_path):
    """Buddies fill up first: after 1 + 1 + 2 devices, half of an eight-device node can still be had."""
    book = LeaseBook(tmp_path, NODE)
    meshes = [book.acquire(size, ME).mesh.name for size in (1, 2, 1, 4)]
    assert meshes == ["n0:0", "n0:2-3", "n0:1", "n0:4-7"]


@pytest.mark.parametrize(
    ("cluster", "wanted", "field"),
    [
        (DESK, "n0:0-7", "mesh"),
        (DESK, "n1:0-1", "mesh"),
        (NODE, "n0:1-2", "mesh"),
        (NODE, "n0:0-2", "mesh"),
        (NODE, "everything", "mesh"),
        (NODE, 3, "num_devices"),
        (NODE, 16, "num_devices"),
        (RACK, 6, "num_devices"),
        (DESK, 0, "num_devices"),
        (DESK, -1, "num_devices"),
    ],
)
def test_an_impossible_request_is_invalid_not_busy(tmp_path, cluster, wanted, field):
    """Impossible is an error that names the field; waiting for it would never end."""
    with pytest.raises(InvalidInput) as error:
        LeaseBook(tmp_path, cluster).acquire(wanted, ME)
    assert field == error.value.field


@pytest.mark.parametrize(
    ("shape", "any_number", "right"),
    [
        ((1, 1), False, "1: cluster desk has a single device"),
        ((1, 1), True, "1: cluster desk has a single device"),
        ((1, 2), False, "1 or 2: cluster desk has 2 devices"),
        ((1, 6), False, "1, 2, 4 or 6: cluster desk has 6 devices"),
        ((1, 8), True, "1 to 8: cluster desk has 8 devices"),
        ((3, 1), False, "1 to 3: cluster desk has 3 nodes of a single device"),
        ((3, 4), False, "1, 2 or 4, or a multiple of 4 up to 12: cluster desk has 3 nodes of 4 devices"),
        ((3, 4), True, "1 to 4, or a multiple of 4 up to 12: cluster desk has 3 nodes of 4 devices"),
    ],
)
def test_a_refused_number_of_devices_is_answered_with_those_that_would_do(tmp_path, shape, any_number, right):
    book = LeaseBook(tmp_path, ClusterShape("desk", *shape, GIB), any_number)
    with pytest.raises(InvalidInput) as refused:
        book.acquire(99, ME)
    assert str(refused.value) == f"num_devices: got 99, expected {right}"


def test_a_refusal_names_the_holders(tmp_path):
    """Who waits is told who holds what since when, each holder once."""
    book = LeaseBook(tmp_path, DESK)
    leased = book.acquire("n0:0-1", ME)
    said = str(book.acquire("n0:1", ME))
    assert said == "waiting for n0:1 of cluster desk: held by ppo/amber-fox (pid 1) since 2026-01-01 10:32"
    leased.release()
    leased.release()
    assert isinstance(book.acquire("n0:1", ME), LeasedMesh)


@pytest.mark.parametrize(
    "written",
    [
        b"[" * 100_000,
        b"[" * 4000,
        b'{"flow_run": ' + b'{"a": ' * 600,
        b'{"pid": 1}',
        b'{"flow_run_id": "1", "flow_run": "x", "pid": 1, "since": "yesterday"}',
        b'{"flow_run_id": "1", "flow_run": "x", "pid": "one", "since": "2026-01-01T10:32:00"}',
        b'{"flow_run_id": "1", "flow_run": "x", "pid": -1, "since": "2026-01-01T10:32:00"}',
        b'{"flow_run_id": "1", "flow_run": "' + b"x" * 5000 + b'", "pid": 1, "since": "2026-01-01T10:32:00"}',
        b"\xff" * 10_000,
        b"9" * 4096,
        b"",
    ],
)
def test_what_another_user_wrote_into_a_lease_file_is_not_trusted(tmp_path, written):
    """Nested, long, wrong or binary: who waits is told that somebody holds the device, and nothing fails."""
    book = LeaseBook(tmp_path, DESK)
    held = book.acquire("n0:0", ME)
    (book.directory / "n0-0.lease").write_bytes(written)
    assert str(book.acquire("n0:0", ME)) == "waiting for n0:0 of cluster desk: held by another process"
    held.release()


def test_a_holders_name_is_shown_as_a_clean_line(tmp_path):
    """No escape sequence, line break, direction mark or lone surrogate reaches a terminal or a state; and no novel."""
    book = LeaseBook(tmp_path, DESK)
    held = book.acquire("n0:0", ME)
    name = "am\x1b[2Jber\n\r\u202e\ud800\0-fox " + "x" * 500
    written = {"flow_run_id": "1", "flow_run": name, "pid": 7, "since": "2026-01-01T10:32:00"}
    (book.directory / "n0-0.lease").write_text(json.dumps(written))
    said = str(book.acquire("n0:0", ME))
    assert said.startswith("waiting for n0:0 of cluster desk: held by am [2Jber -fox xxx")
    assert said.isprintable() and len(said) < 250
    held.release()


def test_a_refused_mesh_holds_no_device(tmp_path):
    """All or nothing: the free half of a refused mesh stays free."""
    book = LeaseBook(tmp_path, DESK)
    one = book.acquire("n0:1", ME)
    assert isinstance(book.acquire("n0:0-1", ME), Busy)
    assert isinstance(book.acquire("n0:0", ME), LeasedMesh)
    one.release()


def _hold(folder, ready):
    LeaseBook(folder, DESK).acquire("n0:0-1", Holder.now("id-2", "ppo/dead-horse"))
    ready.set()
    time.sleep(60)


def test_a_killed_holder_frees_its_devices(tmp_path):
    """kill -9 frees the devices at once; nobody has to clean up."""
    context = multiprocessing.get_context("spawn")
    ready = context.Event()
    process = context.Process(target=_hold, args=(tmp_path, ready))
    process.start()
    assert ready.wait(30)
    book = LeaseBook(tmp_path, DESK)
    assert isinstance(book.acquire(1, ME), Busy)
    process.kill()
    process.join()
    assert isinstance(book.acquire(2, ME), LeasedMesh)


def test_a_child_with_the_descriptors_keeps_the_devices(tmp_path):
    """The worker's death frees nothing while the flow run's process lives."""
    book = LeaseBook(tmp_path, DESK)
    leased = book.acquire("n0:0", ME)
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"], pass_fds=leased.descriptors)
    leased.release()
    assert isinstance(book.acquire("n0:0", ME), Busy)
    child.kill()
    child.wait()
    assert isinstance(book.acquire("n0:0", ME), LeasedMesh)


def _increment_often(folder, counter, times):
    for _ in range(times):
        with lease(DESK, 2, directory=folder, wait_seconds=60, say=lambda _: None):
            value = int(counter.read_text())
            time.sleep(0.001)
            counter.write_text(str(value + 1))


def test_processes_that_compete_take_turns(tmp_path):
    """Two processes increment a file under the lease; no increment is lost."""
    counter = tmp_path / "counter"
    counter.write_text("0")
    context = multiprocessing.get_context("spawn")
    processes = [context.Process(target=_increment_often, args=(tmp_path, counter, 10)) for _ in range(2)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(60)
    assert counter.read_text() == "20"


def test_waiting_ends_and_says_why(tmp_path):
    """A lease that is not free in time is an error that names its holder; meanwhile it was said."""
    said = []
    with lease(DESK, 2, directory=tmp_path, flow_run="first run"):
        start = time.monotonic()
        with (
            pytest.raises(
                LeaseTimeout, match=rf"held by first run \(pid {os.getpid()}\) since .*; gave up after 0.6 s"
            ),
            lease(DESK, 1, directory=tmp_path, wait_seconds=0.6, say=said.append),
        ):
            pass
        assert 0.5 < time.monotonic() - start < 5
    assert len(said) == 1


def test_a_stopped_searcher_does_not_hang_others(tmp_path, monkeypatch):
    """A process frozen inside the book (SIGSTOP) costs others a bounded wait and an error that says where."""
    monkeypatch.setattr("prefect_rlhf.blocks.lease_book.BOOK_LOCK_SECONDS", 0.3)
    book = LeaseBook(tmp_path, DESK)
    book.directory.mkdir(parents=True)
    code = (
        f"import fcntl,os; f=os.open({str(book.directory / 'book.lock')!r}, os.O_RDWR|os.O_CREAT)\nfcntl.flock(f, 2)\n"
    )
    frozen = subprocess.Popen(
        [sys.executable, "-c", code + "print(flush=True); import time; time.sleep(60)"], stdout=-1
    )
    assert frozen.stdout is not None
    frozen.stdout.readline()
    os.kill(frozen.pid, signal.SIGSTOP)
    with pytest.raises(Exception, match="book.lock: locked"):
        book.acquire(1, ME)
    frozen.kill()
    frozen.wait()


def test_a_lease_survives_the_environment_and_guards_its_devices():
    """What the worker writes is what the flow run's process reads; a device beside it is refused by name."""
    mesh = DeviceMesh.parse("n0:2-3")
    given = Lease("pool", "8c1f", NODE, mesh, mesh.devices(), "cuda")
    assert given == Lease.from_environment({"RLHF_LEASE": given.to_json()})
    assert Lease.from_environment({}) is None
    given.require(DeviceMesh.parse("n0:3"), "actor.generate")
    with pytest.raises(DeviceOutsideLease, match="actor.generate: n0:1 is outside lease 8c1f"):
        given.require(DeviceMesh.parse("n0:1"), "actor.generate")


@pytest.mark.parametrize("text", ["", "{}", "[]", "null", '{"pool": 1}'])
def test_a_broken_lease_is_invalid_input(text):
    """A variable set by hand to something else is named, not a traceback."""
    with pytest.raises(InvalidInput, match="RLHF_LEASE"):
        Lease.from_json(text)


def test_default_folder_is_in_the_home():
    """Runs of one user on one machine meet in the same folder without being told."""
    book = LeaseBook(Path("~/leases"), DESK)
    assert Path.home() / "leases" / "desk" == book.directory


def test_a_run_that_may_make_do_with_less_gets_the_largest_mesh_that_is_free(tmp_path):
    """Aligned, inside what was asked for, and never below the least."""
    book = LeaseBook(tmp_path, NODE)
    held = book.acquire("n0:0", ME)
    assert isinstance(book.acquire(8, ME, at_least=8), Busy)
    half = book.acquire(8, ME, at_least=2)
    assert half.mesh.name == "n0:4-7"
    assert book.acquire("n0:0-3", ME, at_least=1).mesh.name == "n0:2-3"
    assert isinstance(book.acquire("n0:4-7", ME, at_least=1), Busy)
    assert book.acquire(8, ME, at_least=1).mesh.name == "n0:1"
    assert str(book.acquire(8, ME, at_least=1)).startswith("waiting for 8 devices")
    held.release()


def test_a_minimum_above_the_request_is_refused(tmp_path):
    with pytest.raises(InvalidInput, match="min_devices: got 4, expected at most 2, the devices that the run asks for"):
        LeaseBook(tmp_path, NODE).acquire("n0:0-1", ME, at_least=4)


@pytest.mark.parametrize("fields", [{"mesh": "n3:0-1"}, {"num_devices": 3}, {"num_devices": 2, "min_devices": 3}])
@pytest.mark.parametrize("dry_run", [True, False])
def test_a_dry_run_is_refused_the_devices_that_its_run_would_be(tmp_path, fields, dry_run):
    """Before it is submitted: afterwards Prefect says in many words that it crashed."""
    configuration = GpuMeshConfiguration(lease_directory=str(tmp_path), command="", env={}, **fields)
    configuration._run = RunFacts("id-1", dry_run=dry_run)
    taken = TakenRun.take(configuration)
    with pytest.raises(InvalidInput, match=f"^{list(fields)[-1]}: got "):
        taken.take_devices()
    taken.release()


@pytest.mark.parametrize(
    ("cluster", "wanted", "says"),
    [
        (RACK, 8, "num_nodes: got 3, expected 1, or Ray"),
        (RACK, "n0-1:0-3", "num_nodes: got 3, expected 1, or Ray"),
        (replace(DESK, node_devices=("h100",)), 1, r"node_kinds: got \['h100'\], expected no kinds of nodes, or Ray"),
    ],
)
def test_a_lease_of_nodes_that_only_ray_finds_is_refused_without_it(tmp_path, cluster, wanted, says, monkeypatch):
    """Here, two ranks would share each device, or be on a machine that is none of the kind."""
    monkeypatch.setattr("prefect_rlhf.blocks.lease.find_spec", lambda name: None)
    with pytest.raises(InvalidInput, match=says), lease(cluster, wanted, directory=tmp_path):
        pass
