"""The gpu-mesh worker with a real server: leases, waiting, and ends of every kind that leave nothing behind."""

import os
import signal

import pytest
from prefect_site import PrefectSite, prefect_site

from prefect_rlhf.blocks.lease_book import Holder, LeaseBook, LeasedMesh
from prefect_rlhf.placement.lease import Lease
from prefect_rlhf.placement.mesh import ClusterShape

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    with prefect_site(tmp_path_factory.mktemp("site")) as started:
        yield started


def _require_nothing_left(site: PrefectSite, run: str, seconds: float) -> float:
    """No process of the run within `seconds`, and then no device held; returns how long it took."""
    took = site.until(lambda: not site.left_of(run), seconds)
    book = LeaseBook(site.folder / "leases", ClusterShape("toy", 1, 2, 8 << 30))

    def free() -> bool:
        answer = book.acquire(2, Holder.now("probe", "probe"))
        if isinstance(answer, LeasedMesh):
            answer.release()
        return isinstance(answer, LeasedMesh)

    site.until(free, 3)
    return took


def test_a_run_gets_its_lease_and_leaves_nothing(site):
    """The flow's process knows pool, mesh and devices; after it, its stubborn child is gone and the devices free."""
    run = site.run("whole")
    site.until_state(run, "COMPLETED")
    _require_nothing_left(site, run, 5)
    lease = Lease.from_json((site.folder / "whole.json").read_text())
    assert (lease.pool, lease.mesh.name, len(lease.devices)) == ("mesh", "n0:0-1", 2)


def test_waiting_and_cancelling(site):
    """A second run waits and says for whom; a dry run does not; a cancelled run is gone within ten seconds.

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
    assert waiting["message"].startswith(f"waiting for 1 device of cluster toy: held by whole/{name} since ")

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


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_the_worker_ends(site, number):
    """Killed or stopped, the worker leaves no process, no lease and no run that seems to go on."""
    run = site.run("whole", steps=5, seconds=5)
    site.until_state(run, "RUNNING")
    site.until(lambda: len(site.left_of(run)) >= 3, 30)
    site.signal_worker(number)
    _require_nothing_left(site, run, 10)
    site.until_state(run, "CRASHED", 30)
    site.until(lambda: site.unfinished_tasks() == [], 20)
    site.start_worker()
