"""The keeper: however a command ends, and whoever dies first, nothing of it is left."""

import asyncio
import os
import signal
import socket
import subprocess
import sys
import time
import uuid
from pathlib import Path

import pytest

from prefect_rlhf.blocks.worker import keeper
from prefect_rlhf.blocks.worker.flow_process import FlowProcess, signal_keeper

STUBBORN = "import signal,time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('up', flush=True); time.sleep(600)"
FAMILY = f"""
import os, subprocess, sys, time
code = {STUBBORN!r}
bare = {{name: value for name, value in os.environ.items() if name != "PREFECT__FLOW_RUN_ID"}}
for environment in (os.environ, bare):  # one that carries the run's id, one that hides it
    command = [sys.executable, "-c", code, sys.argv[2]]
    child = subprocess.Popen(command, env=environment, start_new_session=True, stdout=-1)
    child.stdout.readline()
open(sys.argv[1], "w").write(str(os.getpid()))
time.sleep(600)
"""


def _left(flow_run_id):
    """Processes with the id in their environment or on their command line."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        try:
            words = (process / "environ").read_bytes() + (process / "cmdline").read_bytes()
        except OSError:
            continue
        if flow_run_id.encode() in words and int(process.name) != os.getpid():
            found.append(int(process.name))
    return found


def _tells_the_server(pid):
    try:
        return b"close_run" in Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return False


async def _start(tmp_path, flow_run_id, program=FAMILY, grace_seconds=0.5):
    started = tmp_path / "started"
    process = await FlowProcess.start(
        flow_run_id,
        [sys.executable, "-c", program, str(started), flow_run_id],
        environment=os.environ | {"PREFECT__FLOW_RUN_ID": flow_run_id},
        working_dir=str(tmp_path),
        grace_seconds=grace_seconds,
    )
    deadline = time.monotonic() + 30
    while program is FAMILY and not started.exists() and time.monotonic() < deadline:
        await asyncio.sleep(0.05)
    return process


@pytest.fixture
def run_id():
    return str(uuid.uuid4())


@pytest.mark.parametrize(
    ("program", "status"), [("pass", 0), ("raise SystemExit(3)", 3), ("import os; os.kill(os.getpid(), 9)", -9)]
)
def test_the_status_is_the_commands(tmp_path, run_id, program, status):
    """Exit statuses pass through; a command that dies of signal 9 has status -9."""

    async def scenario():
        process = await _start(tmp_path, run_id, program)
        assert await process.ended(30)
        await process.stop()
        return process.status

    assert asyncio.run(scenario()) == status


def test_stop_kills_every_child(tmp_path, run_id):
    """Children in sessions of their own that ignore SIGTERM, with and without the run's id: all gone."""

    async def scenario():
        process = await _start(tmp_path, run_id)
        assert len(_left(run_id)) >= 4  # keeper, command, two children
        await process.stop()

    asyncio.run(scenario())
    assert _left(run_id) == []


def test_reaping_a_finished_run_signals_no_process(run_id, monkeypatch):
    """Nothing to kill: nothing is signalled, at once. (Process 1 and kernel threads have parent 0.)"""
    signalled = []
    monkeypatch.setattr(os, "kill", lambda *arguments: signalled.append(arguments))
    start = time.monotonic()
    assert keeper.reap(run_id) == ()
    assert signalled == []
    assert time.monotonic() - start < 2


@pytest.mark.parametrize("by", [signal.SIGTERM, signal.SIGKILL])
def test_a_killed_command_leaves_no_children(tmp_path, run_id, by):
    """The controller dies; its children are reaped by the keeper alone."""

    async def scenario():
        process = await _start(tmp_path, run_id)
        os.kill(int((tmp_path / "started").read_text()), by)
        assert await process.ended(10)
        return process.status

    assert asyncio.run(scenario()) == -by
    assert _left(run_id) == []


def test_sigterm_to_the_keeper_stops_the_run(tmp_path, run_id):
    """The identifier that Prefect shows can be used to stop a run by hand."""

    async def scenario():
        process = await _start(tmp_path, run_id)
        signal_keeper(process.identifier, process.flow_run_id, signal.SIGTERM)
        assert await process.ended(10)
        with pytest.raises(LookupError):
            signal_keeper(process.identifier, process.flow_run_id, signal.SIGTERM)

    asyncio.run(scenario())
    assert _left(run_id) == []


def test_a_killed_keeper_is_made_up_for(tmp_path, run_id):
    """With the keeper gone too, `stop` reaps by the run's id."""

    async def scenario():
        process = await _start(tmp_path, run_id)
        signal_keeper(process.identifier, process.flow_run_id, signal.SIGKILL)
        await process.ended(10)
        await process.stop()

    asyncio.run(scenario())
    (hidden,) = _left(run_id)  # the child without the id, which only its keeper could know
    assert run_id.encode() not in Path(f"/proc/{hidden}/environ").read_bytes()
    os.kill(hidden, signal.SIGKILL)


def test_a_dead_worker_takes_the_run_along(tmp_path, run_id):
    """kill -9 of the process that started the keeper: everything is gone within the grace and a moment."""
    worker = f"""
import asyncio, os, sys, time
sys.path.insert(0, {str(Path(__file__).parent)!r})
import test_keeper
from pathlib import Path
asyncio.run(test_keeper._start(Path({str(tmp_path)!r}), {run_id!r}))
open({str(tmp_path / "ready")!r}, "w").close()
time.sleep(600)
"""
    environment = os.environ | {"PREFECT_API_URL": "http://127.0.0.1:9/api"}  # nobody to tell
    process = subprocess.Popen([sys.executable, "-c", worker], env=environment)
    deadline = time.monotonic() + 60
    while not (tmp_path / "ready").exists() and time.monotonic() < deadline:
        time.sleep(0.1)
    process.kill()
    process.wait()
    deadline = time.monotonic() + 20
    while time.monotonic() < deadline and [_tells_the_server(pid) for pid in _left(run_id)] != [True]:
        time.sleep(0.1)
    (teller,) = _left(run_id)  # it waits for the server for minutes, and holds nothing of the run meanwhile
    assert _tells_the_server(teller)
    os.kill(teller, signal.SIGKILL)


def test_a_dead_workers_report_has_its_variables_and_hides_them(tmp_path, run_id):
    """Tools can read what a process started with, so the report gets the key of the server in another way."""
    (tmp_path / "sleeps.py").write_text("import time\ntime.sleep(600)\n")
    worker = f"""
import asyncio, os, sys, time
from prefect_rlhf.blocks.worker.flow_process import FlowProcess
environment = os.environ | {{"PREFECT__FLOW_RUN_ID": {run_id!r}}}
started = {{"environment": environment, "working_dir": {str(tmp_path)!r}, "grace_seconds": 0.5}}
asyncio.run(FlowProcess.start({run_id!r}, [sys.executable, "-m", "sleeps"], **started))
open({str(tmp_path / "ready")!r}, "w").close()
time.sleep(600)
"""
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.settimeout(120)
        address = f"http://127.0.0.1:{server.getsockname()[1]}/api"
        secrets = {"PREFECT_API_URL": address, "PREFECT_API_KEY": "canary"}
        process = subprocess.Popen([sys.executable, "-c", worker], env=os.environ | secrets)
        deadline = time.monotonic() + 60
        while not (tmp_path / "ready").exists() and time.monotonic() < deadline:
            time.sleep(0.1)
        process.kill()
        process.wait()
        connection, _ = server.accept()  # it knows where the server is
        (teller,) = _left(run_id)
        assert _tells_the_server(teller)
        assert b"canary" not in Path(f"/proc/{teller}/environ").read_bytes()
        os.kill(teller, signal.SIGKILL)
        connection.close()
