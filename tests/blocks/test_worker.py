"""The gpu-mesh worker with a real server: leases, waiting, and ends of every kind that leave nothing behind."""

import asyncio
import os
import re
import signal
from uuid import UUID

import pytest
from prefect.client.orchestration import PrefectClient
from prefect.states import Cancelled, Cancelling, Completed, Crashed, Pending, Running
from prefect_site import PREFECT, PrefectSite, prefect_site
from toy_flow import attempts

from prefect_rlhf.blocks.lease_book import Holder, LeaseBook, LeasedMesh
from prefect_rlhf.blocks.worker.claimed_run import TakenRun
from prefect_rlhf.blocks.worker.origin import LABEL
from prefect_rlhf.blocks.worker.recover import recover_runs
from prefect_rlhf.blocks.worker.restarts import Restarts
from prefect_rlhf.blocks.worker.run_records import RunRecords
from prefect_rlhf.blocks.worker.worker import GpuMeshWorker
from prefect_rlhf.placement.devices.lease import Lease
from prefect_rlhf.placement.devices.mesh import ClusterShape

pytestmark = pytest.mark.slow
needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root may leave the machine's processes")


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    with prefect_site(tmp_path_factory.mktemp("site")) as started:
        yield started


def _require_nothing_left(site: PrefectSite, run: str, seconds: float) -> float:
    """No process of the run within `seconds`, and then no device held; returns how long it took."""
    took = site.until(lambda: not site.left_of(run), seconds)
    book = LeaseBook(site.folder / "leases", ClusterShape("toy", 1, 2, 8 << 30))
    site.until(lambda: _is_free(book, 2), 3)
    return took


def _is_free(book: LeaseBook, num_devices: int) -> bool:
    """So many devices at this moment."""
    answer = book.acquire(num_devices, Holder.now("probe", "probe"))
    if isinstance(answer, LeasedMesh):
        answer.release()
    return isinstance(answer, LeasedMesh)


def test_a_run_gets_its_lease_and_cleans_up(site):
    """The flow's process knows pool, mesh and devices; after it, its stubborn child is gone and the devices free."""
    run = site.run("whole")
    site.until_state(run, "COMPLETED")
    _require_nothing_left(site, run, 5)
    lease = Lease.from_json((site.folder / "whole.json").read_text())
    assert (lease.pool, lease.mesh.name, len(lease.devices)) == ("mesh", "n0:0-1", 2)


def test_waiting_and_cancelling(site):
    """A second run waits, says for whom, and gives up; a dry run waits for none; a cancelled run ends in ten seconds.

    Nothing stays Pending, and the run that waited gets the devices.
    """
    first = site.run("whole", steps=20, seconds=2)
    site.until(lambda: len(site.left_of(first)) >= 3, 60)
    site.until_state(first, "RUNNING")
    second, third, dry = (
        site.run("half"),
        site.run("half"),
        site.run("whole", dry_run=True, out=str(site.folder / "dry")),
    )
    name = site.ask(f"/flow_runs/{first}")["name"]
    waiting = site.until_state(second, "WaitingForLease")
    words = rf"waiting for 1 device of cluster toy: held by whole/{name} \(pid \d+\) since \d\d:\d\d"
    assert re.fullmatch(words, waiting["message"])

    impatient = site.run("half", {"lease_wait_seconds": 1})
    assert site.until_state(impatient, "FAILED")["message"].endswith("; gave up after 1 s")
    logs = site.ask("/logs/filter", {"logs": {"flow_run_id": {"any_": [second]}}})
    assert len([log for log in logs if log["message"].startswith("waiting for")]) == 1, "it says so once"

    site.until_state(third, "WaitingForLease")
    site.prefect("flow-run", "cancel", third)
    site.until_state(third, "CANCELLED", 15)

    site.until_state(dry, "COMPLETED")
    assert Lease.from_json((site.folder / "dry").read_text()).devices == ()

    site.prefect("flow-run", "cancel", first)
    assert site.until(lambda: not site.left_of(first), 10) < 10
    site.until_state(first, "CANCELLED", 15)
    site.until_state(second, "COMPLETED")
    _require_nothing_left(site, second, 5)
    site.until(lambda: site.unfinished_tasks() == [], 20)


def test_a_killed_flow_process(site):
    """kill -9 of the flow run's process: the run crashed, nothing of it lives, no task run stays Pending or Running."""
    run = site.run("whole", steps=5, seconds=2)
    site.until_state(run, "RUNNING")
    site.until(lambda: len(site.left_of(run)) >= 3, 30)
    os.kill(site.left_of(run)[1], signal.SIGKILL)  # in order of their start: keeper, flow, child
    site.until_state(run, "CRASHED", 20)
    _require_nothing_left(site, run, 5)
    site.until(lambda: site.unfinished_tasks() == [], 20)


def test_an_impossible_mesh_is_refused(site):
    """A mesh outside the cluster fails at once, in one line, and does not wait."""
    run = site.run("outside")
    assert site.until_state(run, "FAILED")["message"] == "mesh: got 'n0:0-7', expected devices 0 to 1 of each node"


@pytest.mark.all
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_the_worker_ends(site, number):
    """Killed or stopped, the worker leaves no process, lease, folder, or run that seems to go on.

    A run that waited is taken by the next worker, and so is one that may start again; it can be cancelled meanwhile.
    """
    out = str(site.folder / f"restarted-{number.name}")
    restarted = site.run("wide", {"max_restarts": 1}, out=out, steps=5, seconds=20, quick_again=True)
    run = site.run("whole", steps=5, seconds=20)
    for started in (run, restarted):
        site.until(lambda started=started: len(site.left_of(started)) >= 3, 60)
        site.until_state(started, "RUNNING")
    waiting, unwanted = site.run("half"), site.run("half")
    for waits in (waiting, unwanted):
        site.until_state(waits, "WaitingForLease")

    site.signal_worker(number)
    site.prefect("flow-run", "cancel", unwanted)
    assert site.state(unwanted)["type"] == "CANCELLED"
    _require_nothing_left(site, run, 10)
    site.until_state(run, "CRASHED", 30)
    words = "The worker was stopped." if number == signal.SIGTERM else "The worker of this flow run died."
    assert site.state(run)["message"] == words
    assert site.until_state(restarted, "AwaitingRetry", 30)["message"] == f"restart 1 of 1: {words}"
    site.until(lambda: list(site.temporary.glob("gpu-mesh-*")) == [], 10)

    site.start_worker()
    site.until_state(waiting, "COMPLETED")
    site.until_state(restarted, "COMPLETED")
    assert attempts(out) == 2
    assert site.states(unwanted)[-1] == "Cancelled"
    site.until(lambda: site.unfinished_tasks() == [], 20)


@pytest.mark.all
def test_a_run_without_worker_and_keeper_is_recovered(site):
    """Worker and keeper die together, as when the machine goes down: the next worker of this host finds the run."""
    out = str(site.folder / "recovered")
    run = site.run("wide", {"max_restarts": 1}, out=out, steps=5, seconds=20, quick_again=True)
    site.until(lambda: len(site.left_of(run)) >= 3, 60)
    site.until_state(run, "RUNNING")
    site.signal_worker(signal.SIGKILL)
    for process in site.left_of(run)[:1]:  # in order of their start: keeper, flow, child
        os.kill(process, signal.SIGKILL)
    site.start_worker()
    site.until_state(run, "COMPLETED", 120)
    assert attempts(out) == 2
    assert [name for name in site.states(run) if name in ("AwaitingRetry", "Crashed")] == ["AwaitingRetry"]


def test_orphaned_runs_are_recovered(site, monkeypatch, caplog):
    """Those that are lost for certain: one that ran starts again or crashed, one that had not is put back.

    All others stay as they are, with one line in the log if this host may have had them.
    """
    monkeypatch.setattr("prefect_rlhf.blocks.worker.after_end.LATE_EVENTS_SECONDS", 0)
    site.prefect("work-pool", "create", "nobody", "--type", "gpu-mesh")  # no worker looks at it
    cases = {
        "running": (Running(), {}, "AwaitingRetry"),
        "has restarted": (Running(), {"prefect-rlhf.restarts": 1}, "Crashed"),
        "not begun": (None, {}, "Scheduled"),
        "being cancelled": (Cancelling(), {}, "Cancelled"),
        "over": (Completed(), {}, "Completed"),
        "of another host": (Running(), {f"{LABEL}host": "another"}, "Running"),
        "with a worker": (Running(), {}, "Running"),
        "without an origin": (Running(), {f"{LABEL}attempt": "", f"{LABEL}boot": ""}, "Running"),
        "of another lease folder": (Running(), {f"{LABEL}attempt": "another"}, "Running"),
        "of two workers": (Running(), {}, "Running"),
    }

    async def configure(flow_run):
        folder = str(site.folder / "nobody")
        configuration = GpuMeshWorker.job_configuration(command="", env={}, lease_directory=folder, max_restarts=1)
        configuration.prepare_for_flow_run(flow_run)
        return configuration

    async def taken_run(client, deployment, name):
        """A run as a worker leaves it that is killed: taken, and its lock is free."""
        state, labels, _ = cases[name]
        run = await client.create_flow_run_from_deployment(deployment, name=name)
        taken = TakenRun.take(await configure(run))
        await client.update_flow_run_labels(run.id, taken.leave_origin() | labels)
        attempt = "of another" if name == "of two workers" else taken.origin.attempt
        await client.set_flow_run_state(run.id, Pending(message=f"Taken by worker tester on here, attempt {attempt}"))
        await client.set_flow_run_state(run.id, Pending(name="Submitting"), force=True)  # as Prefect does afterwards
        if state is not None:
            await client.set_flow_run_state(run.id, state, force=True)
        if name != "with a worker":
            os.close(taken.lock.descriptor)
        return run.id

    async def names():
        async with PrefectClient(site.api) as client:
            flow_id = await client.create_flow_from_name("orphans")
            deployment = await client.create_deployment(flow_id, "orphans", work_pool_name="nobody")
            runs = {name: await taken_run(client, deployment, name) for name in cases}
            left_alone: set[UUID] = set()
            for _ in range(2):
                await recover_runs(client, "nobody", configure, left_alone)
            return {name: (await client.read_flow_run(run)).state.name for name, run in runs.items()}

    with caplog.at_level("INFO", logger="prefect.workers"):
        assert asyncio.run(names()) == {name: wanted for name, (_, _, wanted) in cases.items()}
    told = [message for message in caplog.messages if "left alone" in message]
    left = ("without an origin", "of another lease folder", "of two workers")
    assert sorted(told) == sorted(line for name in left for line in told if line.startswith(f"Flow run {name} is"))
    assert len(told) == 3 and all("Change state" in line for line in told)


def test_no_end_is_ever_overwritten(site, monkeypatch):
    """Whatever a worker, which read the state a moment before, would set: the end that the run has by then stays."""
    monkeypatch.setattr("prefect_rlhf.blocks.worker.after_end.LATE_EVENTS_SECONDS", 0)
    done = Completed(message="All states completed.")

    async def finals():
        async with PrefectClient(site.api) as client:
            flow_id = await client.create_flow_from_name("ends")
            deployment = await client.create_deployment(flow_id, "ends", work_pool_name="mesh", paused=True)
            found = []
            for method, words in (
                ("end", (Crashed(message="died"),)),
                ("end", (Cancelled(message="stopped"),)),
                ("start_again", (Restarts(1, 2), "died")),
                ("put_back", ("died",)),
            ):
                run = await client.create_flow_run_from_deployment(deployment, state=Pending())
                await client.set_flow_run_state(run.id, done, force=True)
                accepted = await getattr(RunRecords(client, run.id), method)(*words)
                state = (await client.read_flow_run(run.id)).state
                found.append((bool(accepted), state.name, state.message))
            return found

    assert asyncio.run(finals()) == [(False, "Completed", done.message)] * 4


@pytest.mark.all
@needs_root
def test_a_worker_ends_no_run_that_it_cannot_see(site):
    """A second worker of the pool has the same host name, and its own processes and lease folder, as in a container.

    A run of the first goes on, is Completed, and does not start a second time beside itself.
    """
    out = str(site.folder / "seen")
    run = site.run("wide", {"max_restarts": 1}, out=out, steps=4, seconds=4, quick_again=True)
    site.until_state(run, "RUNNING")
    name = site.ask(f"/flow_runs/{run}")["name"]
    own = site.folder / "own-leases"
    own.mkdir()
    (site.folder / "leases").mkdir(exist_ok=True)
    elsewhere = f"mount --bind {own} {site.folder / 'leases'} && exec {PREFECT} worker start --pool mesh --name other"
    site.start_process("other", ["unshare", "--pid", "--fork", "--mount", "--mount-proc", "sh", "-c", elsewhere])
    try:
        other = site.folder / "other.log"
        site.until(lambda: f"Flow run {name} is left alone: its worker had another" in _words(other), 90)
        assert "and another PID namespace" in _words(other)
        site.until_state(run, "COMPLETED")
        _require_nothing_left(site, run, 10)
    finally:
        site.end_process("other")
    assert attempts(out) == 1
    assert site.states(run)[-2:] == ["Running", "Completed"]


def _words(log):
    return " ".join(log.read_text(errors="replace").split())


AGAIN = {"type": "SCHEDULED", "name": "AwaitingRetry", "message": "Retry from the UI"}  # what the UI's button sends


@pytest.mark.all  # `test_the_worker_ends` has a restart
def test_failures_restarts_and_retries(site):
    """A mistake ends a run, a lost rank is a restart, a bug has its traceback once; Retry is taken whenever pressed."""

    def start(name, job_variables=None, **parameters):
        return site.run("wide", job_variables, out=str(site.folder / name), **parameters)

    mistake = start("mistake", {"max_restarts": 2}, failure="mistake", failures=9, steps=3)
    restarted = start("restarted", {"max_restarts": 2}, failure="lost", steps=3)
    in_vain = start("in_vain", {"max_restarts": 1}, failure="lost", failures=9)
    retried = start("retried", {"env": {"PREFECT_FLOWS_DEFAULT_RETRIES": "1"}}, failure="lost")
    again = start("again", failure="bug")
    again_at_once = start("again_at_once", failure="lost")

    site.until_state(again_at_once, "FAILED")
    site.set_state(again_at_once, AGAIN)
    assert site.until_state(mistake, "FAILED")["message"] == "InvalidInput: steps: got 0, expected at least 1"
    site.until_state(again, "FAILED")
    site.until(lambda: not site.left_of(again), 20)
    site.set_state(again, AGAIN)
    for run in (restarted, retried, again, again_at_once):
        site.until_state(run, "COMPLETED", 120)
    assert site.until_state(in_vain, "FAILED", 120)["message"] == "RankLost: rank 1 was killed by SIGKILL"

    names = ("restarted", "in_vain", "retried", "again")
    tries = {name: attempts(str(site.folder / name)) for name in names}
    assert tries == {"restarted": 2, "in_vain": 2, "retried": 2, "again": 2}
    assert {"Failed", "Crashed"}.isdisjoint(site.states(restarted) + site.states(retried))
    assert "restart 1 of 2: RankLost: rank 1 was killed by SIGKILL" in site.logged(restarted)
    assert "of 2: InvalidInput" not in site.logged(mistake)
    assert "Crashed" not in site.states(again) + site.states(again_at_once)
    site.until(lambda: site.ask(f"/flow_runs/{in_vain}")["labels"]["prefect-rlhf.restarts"] == 0, 20)
    assert [site.logged(run).count("Traceback") for run in (mistake, restarted, in_vain, retried)] == [0, 0, 0, 0]
    assert site.logged(again).count("Traceback") == 1
    site.until(lambda: site.unfinished_tasks() == [], 20)


@pytest.mark.all  # as `benchmarks/faults/chaos.py` does with a real run, of which `make test` has a part
def test_a_suspended_run_ends_its_step_and_goes_on_when_resumed(site):
    """Its devices are free when its process has ended, not before; Resume may be pressed before that."""
    out = str(site.folder / "suspended")
    run = site.run("whole", out=out, suspended=True, seconds=3)
    site.until(lambda: attempts(out) == 1, 60)
    suspended = {"type": "PAUSED", "name": "Suspended", "state_details": {"pause_reschedule": True}}
    site.set_state(run, suspended, force=True)  # what the UI's button sends
    assert len(site.left_of(run)) >= 3
    next_run = site.run("half")
    site.until_state(next_run, "WaitingForLease")
    site.until_state(next_run, "COMPLETED")
    assert site.state(run)["name"] == "Suspended"
    site.ask(f"/flow_runs/{run}/resume", {})
    site.until_state(run, "COMPLETED")
    assert attempts(out) == 2


@pytest.mark.all
def test_a_run_may_make_do_with_fewer_devices(site):
    """The largest free part of the mesh, at once."""
    book = LeaseBook(site.folder / "leases", ClusterShape("wide", 1, 8, 8 << 30))
    site.until(lambda: _is_free(book, 8), 30)  # a run is COMPLETED a moment before its devices are free
    held = book.acquire("n0:0", Holder.now("probe", "probe"))
    assert isinstance(held, LeasedMesh)
    out = site.folder / "fewer"
    run = site.run("wide", {"num_devices": 8, "min_devices": 2}, out=str(out))
    try:
        site.until_state(run, "COMPLETED")
    finally:
        held.release()
    assert Lease.from_json(out.read_text()).mesh.name == "n0:4-7"


def test_a_run_that_cannot_start_explains_it_in_one_line(site):
    """A job variable that is not there: failed, and no worker's trouble."""
    misspelt = site.run("wide", {"mehs": "n0:0"})
    assert site.until_state(misspelt, "FAILED")["message"].startswith("job_variables: got 'mehs', expected one of")
