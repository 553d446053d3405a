"""No process is left: not by a deadline, not by an error, not by the death of the process that had the pool."""

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from host_cases import QUICK, function, row

from prefect_rlhf.engines.functions.function import HostSettings
from prefect_rlhf.engines.functions.scoring.pool import HostPool
from tests.support.alive import is_alive
from tests.support.cases import combinations, first

PROGRAM = """
import sys
from host_cases import function, row
from prefect_rlhf.engines.functions.scoring.pool import HostPool
from prefect_rlhf.engines.functions.function import HostSettings

pool = HostPool([function(sys.argv[1])], HostSettings(2, 1000.0))
pool.score([row("hang in C", file=file) for file in sys.argv[2:]], "a test")
"""


PROCESSES = {"stays_with_a_child": 4, "starts_a_daemon": 2}


def pids_in(files, seconds=30.0):
    """The processes that wrote their numbers, once all have."""
    end = time.monotonic() + seconds
    while not all(file.exists() for file in files):
        assert time.monotonic() < end, "the functions were not called"
        time.sleep(0.01)
    return [int(pid) for file in files for pid in file.read_text().split()]


def left(pids, seconds=20.0):
    """Which of these processes still run, when none of them should."""
    end = time.monotonic() + seconds
    while any(map(is_alive, pids)) and time.monotonic() < end:
        time.sleep(0.01)
    return [pid for pid in pids if is_alive(pid)]


@pytest.mark.parametrize(
    ("number", "name"),
    combinations(
        (signal.SIGKILL, signal.SIGTERM, signal.SIGINT),
        PROCESSES,
        briefly=[(signal.SIGKILL, "stays_with_a_child"), (signal.SIGTERM, "starts_a_daemon")],
    ),
)
def test_workers_end_with_the_process_that_has_the_pool(tmp_path, number, name):
    """However it ends, though they hold the interpreter for ever; and what they started with them, daemons too."""
    files = [tmp_path / "a", tmp_path / "b"]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(Path(__file__).parent), *filter(None, sys.path)])}
    command = [sys.executable, "-c", PROGRAM, name, *map(str, files)]
    parent = subprocess.Popen(command, env=environment, stderr=subprocess.DEVNULL)
    try:
        pids = pids_in(files)
        assert len(pids) == PROCESSES[name]
        assert all(map(is_alive, pids))
    finally:
        parent.send_signal(number)
        parent.wait(30)
    assert left(pids) == []


def test_a_worker_that_died_between_two_scores_costs_no_row():
    with HostPool([function("pid")], HostSettings(1, 60.0, retries=0, most_failed=0.0)) as pool:
        (one,) = pool.score([row("a")], "a test").values["pid"]
        os.kill(int(one), signal.SIGKILL)
        assert left([int(one)]) == []
        (other,) = pool.score([row("a")], "a test").values["pid"]
    assert other != one


def test_a_worker_past_its_deadline_dies_with_its_children(tmp_path):
    file = tmp_path / "a"
    with HostPool([function("stays_with_a_child")], QUICK) as pool:
        assert len(pool.score([row("", file=str(file))], "a test").failures) == 1
        assert left(pids_in([file])) == []


@pytest.mark.parametrize("response", first(2, ["good", "hang", "SIGKILL", "os._exit", "stop"]))
def test_a_daemon_of_a_function_ends_with_its_worker(tmp_path, response):
    """Whether the row has a value, the process dies, or it is past its deadline; at the pool's end at the latest."""
    files = [tmp_path / "a", tmp_path / "b"]
    with HostPool([function("starts_a_daemon")], QUICK) as pool:
        rows = [row(response, file=str(file)) for file in files]
        assert len(pool.score(rows, "a test").failures) == (0 if response == "good" else 2)
        if response != "good":
            assert left(pids_in(files)) == []
    assert not any(map(is_alive, pids_in(files))), "closing waits for them"


def test_an_interrupt_leaves_no_worker(tmp_path):
    """The pool may be used again after it."""
    file = tmp_path / "a"

    def interrupt():
        pids_in([file])
        os.kill(os.getpid(), signal.SIGINT)

    pool = HostPool([function("stays_with_a_child")], HostSettings(1, 1000.0))
    thread = threading.Thread(target=interrupt)
    thread.start()
    with pytest.raises(KeyboardInterrupt):
        pool.score([row("", file=str(file))], "a test")
    thread.join()
    assert left(pids_in([file])) == []


def test_closing_leaves_no_process_and_no_descriptor():
    def children():
        return {int(pid) for file in Path("/proc/self/task").glob("*/children") for pid in file.read_text().split()}

    def descriptors():
        return len(list(Path("/proc/self/fd").iterdir()))

    before, open_before = children(), descriptors()
    pool = HostPool([function("length")], HostSettings(2, 60.0))
    pool.score([row("a")] * 8, "a test")
    started = children() - before
    assert len(started) == 2
    pool.close()
    pool.close()
    assert left(started) == []
    assert descriptors() == open_before
