"""The queue of a lease book: runs start in order of arrival; a later one earlier only if it delays none that waits."""

import json
import multiprocessing
import os
import signal
import time
from datetime import datetime

import pytest
from hypothesis import given
from hypothesis import strategies as st

from prefect_rlhf.blocks.lease import lease
from prefect_rlhf.blocks.lease_book import Busy, Holder, LeaseBook, LeasedMesh
from prefect_rlhf.blocks.lease_files import FileLock
from prefect_rlhf.placement.devices.mesh import ClusterShape

DESK = ClusterShape("desk", 1, 2, 1 << 30)
RACK = ClusterShape("rack", 2, 4, 1 << 30)
WANTS = [1, 2, 4, 8, "n0:0", "n0:2-3", "n1:0-3", "n1:1"]
CONTEXT = multiprocessing.get_context("spawn")


def _devices(wanted):
    """Every device that a run which wants that could have: those of any aligned mesh of the size are all of RACK."""
    if isinstance(wanted, int):
        return {(node, index) for node in range(2) for index in range(4)}
    node, _, indices = wanted[1:].partition(":")
    first, _, last = indices.partition("-")
    return {(int(node), index) for index in range(int(first), int(last or first) + 1)}


def _fits(wanted, free):
    """Whether an aligned mesh that is wholly in `free` would do."""
    if not isinstance(wanted, int):
        return _devices(wanted) <= free
    if wanted == 8:
        return len(free) == 8
    firsts = [(node, first) for node in range(2) for first in range(0, 4, wanted)]
    return any({(node, first + i) for i in range(wanted)} <= free for node, first in firsts)


@given(
    events=st.lists(
        st.one_of(
            st.tuples(st.just("arrive"), st.sampled_from(WANTS)),
            st.tuples(st.just("ask"), st.integers(0, 5)),
            st.tuples(st.sampled_from(["end", "die"]), st.integers(0, 5)),
        ),
        max_size=25,
    )
)
def test_a_later_run_starts_earlier_only_if_no_run_that_waits_could_use_its_devices(tmp_path_factory, events):
    """For any order of arrivals, questions, ends and deaths; and who may start is never told to wait."""
    book = LeaseBook(tmp_path_factory.mktemp("leases"), RACK)
    waiting: dict[str, tuple[str | int, FileLock]] = {}  # in order of arrival
    held: list[LeasedMesh] = []
    for number, (kind, choice) in enumerate(events):
        if kind == "arrive":
            ticket = book.enter(choice, f"run-{number}", f"run-{number}")
            assert ticket is not None
            waiting[f"run-{number}"] = choice, ticket
        elif kind == "end" and choice < len(held):
            held.pop(choice).release()
        elif kind == "die" and choice < len(waiting):
            os.close(waiting.pop(list(waiting)[choice])[1].descriptor)  # as the kernel does it
        elif kind == "ask" and choice < len(waiting):
            name = list(waiting)[choice]
            earlier = set().union(*(_devices(waiting[other][0]) for other in list(waiting)[:choice]))
            taken = {tuple(device) for one in held for device in one.mesh.devices()}
            free = _devices(8) - taken - earlier
            answer = book.acquire(waiting[name][0], Holder.now(name, name))
            assert isinstance(answer, LeasedMesh) == _fits(waiting[name][0], free)
            if isinstance(answer, LeasedMesh):
                assert {tuple(device) for device in answer.mesh.devices()} <= free
                held.append(answer)
                waiting.pop(name)[1].release()
    for one in held:
        one.release()
    for _, ticket in waiting.values():
        ticket.release()


def _lease_and_note(folder, name, wanted, notes):
    with (
        lease(DESK, wanted, directory=folder, wait_seconds=60, flow_run=name, say=lambda _: None),
        notes.open("a") as file,
    ):
        file.write(f"{name}\n")


def _queued(book, count):
    deadline = time.monotonic() + 60
    while [waiter.flow_run for waiter in book.queue.waiting()] != count:
        assert time.monotonic() < deadline
        time.sleep(0.02)


@pytest.mark.all  # the other tests have the order
def test_processes_start_in_order_of_arrival(tmp_path):
    """One that wants one device and came later does not overtake one that wants two, though a device is free."""
    book, notes = LeaseBook(tmp_path, DESK), tmp_path / "notes"
    held = book.acquire("n0:0", Holder.now("held", "held"))
    names = ["first", "second", "third"]
    processes = []
    for name, wanted in zip(names, [2, 2, 1], strict=True):
        process = CONTEXT.Process(target=_lease_and_note, args=(tmp_path, name, wanted, notes))
        process.start()
        processes.append(process)
        _queued(book, names[: len(processes)])
    assert isinstance(book.acquire("n0:1", Holder.now("late", "late")), Busy)
    held.release()
    for process in processes:
        process.join(60)
    assert notes.read_text().split() == names
    assert list(book.queue.folder.iterdir()) == []


def test_a_dead_waiter_loses_its_place(tmp_path):
    """kill -9 of who waits: the next one starts, and no ticket stays."""
    book = LeaseBook(tmp_path, DESK)
    held = book.acquire("n0:0", Holder.now("held", "held"))
    process = CONTEXT.Process(target=_lease_and_note, args=(tmp_path, "dead", 2, tmp_path / "notes"))
    process.start()
    _queued(book, ["dead"])
    late = Holder.now("late", "late")
    assert isinstance(book.acquire("n0:1", late), Busy)
    os.kill(process.pid, signal.SIGKILL)
    process.join()
    assert isinstance(book.acquire("n0:1", late), LeasedMesh)
    assert list(book.queue.folder.iterdir()) == []
    held.release()


def test_a_waiter_that_asks_no_longer_is_passed_until_it_asks_again(tmp_path, monkeypatch):
    """A stopped process, or a worker without its server, keeps nobody from free devices; its place is there later."""
    book = LeaseBook(tmp_path, DESK)
    ticket = book.enter(2, "silent", "silent")
    assert isinstance(book.acquire(1, Holder.now("late", "late")), Busy)
    os.utime(ticket.path, (0, 0))
    one = book.acquire("n0:0", Holder.now("late", "late"))
    assert isinstance(one, LeasedMesh)
    assert isinstance(book.acquire(2, Holder.now("silent", "silent")), Busy)
    one.release()
    assert isinstance(book.acquire(1, Holder.now("later", "later")), Busy)


def test_a_waiting_run_learns_its_holders_and_earlier_waiters(tmp_path):
    book = LeaseBook(tmp_path, DESK)
    held = book.acquire("n0:0", Holder.now("held", "ppo/amber-fox"))
    first = book.enter(2, "first", "grpo/tidy-owl")
    line = str(book.acquire(1, Holder.now("late", "late")))
    assert line.startswith("waiting for 1 device of cluster desk: held by ppo/amber-fox (pid ")
    assert line.endswith(", after grpo/tidy-owl, which comes first")
    held.release()
    line = str(book.acquire("n0:1", Holder.now("late", "late")))
    assert line == "waiting for n0:1 of cluster desk: after grpo/tidy-owl, which comes first"
    first.release()


def test_since_when_a_run_holds_its_devices_is_when_it_got_them(tmp_path):
    """And not when it began to wait."""
    book, freed = LeaseBook(tmp_path, DESK), []
    held = book.acquire(2, Holder.now("held", "held"))

    def let_go(_):
        began = datetime.now().astimezone().replace(microsecond=0)
        while (now := datetime.now().astimezone().replace(microsecond=0)) == began:
            time.sleep(0.01)
        freed.append(now)
        held.release()

    with lease(DESK, 2, directory=tmp_path, flow_run="second", say=let_go):
        written = json.loads((book.directory / "n0-0.lease").read_text())
    assert written["flow_run"] == "second"
    assert [datetime.fromisoformat(written["since"]) >= time for time in freed] == [True]


def test_a_run_has_a_single_place_even_with_two_workers(tmp_path):
    """Two workers see one run: the place of the first counts for both, and an earlier arrival comes first."""
    book = LeaseBook(tmp_path, DESK)
    place = book.enter(2, "run", "run", arrived=1000.0)
    assert book.enter(2, "run", "run") is None
    early = book.enter(2, "early", "early", arrived=999.0)
    assert [waiter.flow_run for waiter in book.queue.waiting()] == ["early", "run"]
    early.release()
    answer = book.acquire(2, Holder.now("run", "run"))
    assert isinstance(answer, LeasedMesh)
    book.queue.leave("run")
    answer.release()
    assert isinstance(book.acquire(2, Holder.now("late", "late")), LeasedMesh)
    place.release()


@pytest.mark.parametrize(
    "written",
    [
        "[" * 4000,
        "{}",
        "null",
        '{"priority": 1, "arrived": NaN, "number": 1, "devices": "n0:0", "flow_run": "x"}',
        '{"priority": 1, "arrived": 1, "number": 1e400, "devices": "n0:0", "flow_run": "x"}',
        '{"priority": 1, "arrived": 1, "number": 1, "devices": "everything", "flow_run": "x"}',
        '{"priority": 1, "arrived": 1, "number": 1, "devices": "n0:0", "flow_run": "' + "x" * 5000 + '"}',
    ],
)
def test_another_users_malformed_ticket_is_ignored(tmp_path, written):
    book = LeaseBook(tmp_path, DESK)
    ticket = book.enter(2, "bad", "bad")
    ticket.path.write_text(written)
    os.mkfifo(book.queue.folder / "fifo.ticket")
    (book.queue.folder / "link.ticket").symlink_to("/dev/zero")
    (book.queue.folder / "folder.ticket").mkdir()
    assert isinstance(book.acquire(2, Holder.now("late", "late")), LeasedMesh)
    ticket.release()


def test_a_tickets_name_is_shown_as_a_clean_line(tmp_path):
    book = LeaseBook(tmp_path, DESK)
    ticket = book.enter(2, "bad", "bad")
    ticket.path.write_text(
        json.dumps({"priority": 1, "arrived": 1, "number": 1, "devices": "n0:0-1", "flow_run": "a\x1b[2J\nb"})
    )
    line = str(book.acquire(1, Holder.now("late", "late")))
    assert line == "waiting for 1 device of cluster desk: after a [2J b, which comes first"
    ticket.release()
