"""A gpu-mesh pool runs any Prefect flow: each gets its devices or waits, in order, and leaves nothing behind."""

import json
import os
import shutil
import signal
from collections import Counter
from pathlib import Path
from uuid import uuid4

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st
from plain_flow import noted
from prefect.client.schemas.objects import Flow, FlowRun
from prefect_site import FINAL, PrefectSite, everything_up

from prefect_rlhf.blocks.lease_book import Busy, Holder, LeaseBook, LeasedMesh
from prefect_rlhf.blocks.worker.claimed_run import TakenRun
from prefect_rlhf.blocks.worker.configuration import DEVICES_VARIABLE
from prefect_rlhf.blocks.worker.worker import GpuMeshWorker
from prefect_rlhf.errors.errors import InvalidInput
from prefect_rlhf.placement.devices.lease import ENVIRONMENT_VARIABLE, Lease
from prefect_rlhf.placement.devices.mesh import ClusterShape

PROJECT = Path(__file__).parents[2]
EXAMPLE = PROJECT / "docs" / "examples" / "share_gpus"
BOX = ClusterShape("box", 1, 10, 1 << 30)
SEEN_BY_WORKER = ",".join(f"GPU-{number}" for number in range(8))
AGAIN = {"type": "SCHEDULED", "name": "AwaitingRetry", "message": "Retry from the UI"}  # what the UI's button sends
SUSPENDED = {"type": "PAUSED", "name": "Suspended", "state_details": {"pause_reschedule": True}}


def configured(folder, flow="crunch", parameters=None, **variables):
    """The configuration of a run of a flow of that name."""
    known = {"devices_per_node": 8, "device_memory_gib": 8, "lease_directory": str(folder), "command": ""}
    configuration = GpuMeshWorker.job_configuration(**known | {"env": {}} | variables)
    asked = FlowRun(id=uuid4(), flow_id=uuid4(), name="amber-fox", parameters=parameters or {})
    configuration.prepare_for_flow_run(asked, flow=Flow(name=flow))
    return configuration


@given(events=st.lists(st.tuples(st.sampled_from(["come", "end"]), st.integers(1, 10)), max_size=30))
def test_consecutive_free_devices_go_only_to_the_first_in_line(tmp_path_factory, events):
    """For any sizes on ten devices: a run has just its number, no device twice, and waits only if there is no gap."""
    book = LeaseBook(tmp_path_factory.mktemp("leases"), BOX, any_number=True)
    waiting, held = [], []
    for number, (kind, size) in enumerate(events):
        if kind == "come":
            waiting.append((str(number), size, book.enter(size, str(number), str(number))))
        elif size <= len(held):
            held.pop(size - 1).release()
        for name, wanted, ticket in list(waiting):
            taken = {device.index for lease in held for device in lease.mesh.devices()}
            gap = any(taken.isdisjoint(range(first, first + wanted)) for first in range(11 - wanted))
            answer = book.acquire(wanted, Holder.now(name, name))
            assert isinstance(answer, LeasedMesh) == (gap and waiting[0][0] == name)
            if isinstance(answer, LeasedMesh):
                got = {device.index for device in answer.mesh.devices()}
                assert len(got) == wanted and taken.isdisjoint(got)
                held.append(answer)
                ticket.release()
                waiting.pop(0)
    for lease in held:
        lease.release()
    for _, _, ticket in waiting:
        ticket.release()


def test_a_run_of_an_earlier_queue_comes_before_runs_that_waited_longer(tmp_path):
    """Prefect's priority 1 before 2; of one priority, whoever came first; the line names who comes before."""
    book = LeaseBook(tmp_path, ClusterShape("box", 1, 1, 1 << 30), any_number=True)
    held = book.acquire(1, Holder.now("held", "held"))
    for name, priority in (("nightly", 2), ("urgent", 1), ("later", 2)):
        book.enter(1, name, name, priority=priority)
    held.release()
    told = {name: book.acquire(1, Holder.now(name, name)) for name in ("later", "nightly")}
    assert all(isinstance(answer, Busy) for answer in told.values())
    assert str(told["nightly"]).endswith(": after urgent, which comes first")
    assert str(told["later"]).endswith(": after urgent; nightly, which comes first")
    assert isinstance(book.acquire(1, Holder.now("urgent", "urgent")), LeasedMesh)


def test_a_plain_flow_sees_its_gpus_alone_and_knows_their_numbers(tmp_path):
    """By the worker's own list; a run of this package inside it counts its GPUs in the list that it sees."""
    configuration = configured(tmp_path, kind="cuda", num_devices=3, env={"CUDA_VISIBLE_DEVICES": SEEN_BY_WORKER})
    held = LeaseBook(tmp_path, configuration.shape).acquire(2, Holder.now("held", "held"))
    taken = TakenRun.take(configuration)
    assert taken.take_devices() is None
    seen = configuration.environment(taken.lease)
    assert seen["CUDA_VISIBLE_DEVICES"] == "GPU-2,GPU-3,GPU-4" and seen[DEVICES_VARIABLE] == "2,3,4"
    assert seen["CUDA_DEVICE_ORDER"] == "PCI_BUS_ID"
    assert Lease.from_json(seen[ENVIRONMENT_VARIABLE]).gpus == (0, 1, 2)
    taken.release()
    held.release()


def test_without_gpus_a_plain_flow_knows_the_numbers_of_its_devices(tmp_path):
    configuration = configured(tmp_path, kind="cpu", mesh="n0:3-5", env={"CUDA_VISIBLE_DEVICES": SEEN_BY_WORKER})
    taken = TakenRun.take(configuration)
    assert taken.take_devices() is None
    seen = configuration.environment(taken.lease)
    assert (seen["CUDA_VISIBLE_DEVICES"], seen[DEVICES_VARIABLE]) == ("", "3,4,5")
    taken.release()


def test_on_several_nodes_a_plain_flow_sees_no_gpu_since_its_own_may_be_elsewhere(tmp_path):
    """Those of the worker's machine are not leased to it; a training run gets its GPUs through Ray."""
    variables = {"num_nodes": 2, "kind": "cuda", "env": {"CUDA_VISIBLE_DEVICES": SEEN_BY_WORKER}}
    for flow, seen in (("crunch", ""), ("rlhf", SEEN_BY_WORKER)):
        configuration = configured(tmp_path, flow, **variables)
        environment = configuration.environment(configuration.lease("1", configuration.shape.whole))
        assert environment["CUDA_VISIBLE_DEVICES"] == seen and DEVICES_VARIABLE not in environment


def test_a_plain_flow_with_a_parameter_dry_run_has_its_devices(tmp_path):
    """Only flows of this package promise that a dry run uses none."""
    for flow, number in (("crunch", 2), ("rlhf", 0)):
        configuration = configured(tmp_path / flow, flow, {"dry_run": True}, num_devices=2)
        taken = TakenRun.take(configuration)
        assert taken.take_devices() is None and len(taken.lease.devices) == number
        taken.release()


@pytest.mark.parametrize(
    ("variables", "line"),
    [
        ({"num_devices": 9}, "num_devices: got 9, expected 1 to 8: cluster local has 8 devices"),
        ({"mesh": "n0:6-8"}, "mesh: got 'n0:6-8', expected devices 0 to 7 of each node"),
        (
            {"num_devices": 2, "min_devices": 3},
            "min_devices: got 3, expected at most 2, the devices that the run asks for",
        ),
        (
            {"num_devices": 8, "kind": "cuda", "env": {"CUDA_VISIBLE_DEVICES": "0,1"}},
            "CUDA_VISIBLE_DEVICES: got '0,1', expected at least 8 GPUs, which the lease has",
        ),
    ],
)
def test_devices_outside_the_pool_are_refused_in_one_line(tmp_path, variables, line):
    taken = TakenRun.take(configured(tmp_path, **variables))
    with pytest.raises(InvalidInput) as refused:
        taken.take_devices()
    assert str(refused.value) == line
    taken.release()


def test_a_training_run_still_needs_an_aligned_mesh(tmp_path):
    taken = TakenRun.take(configured(tmp_path, "rlhf", num_devices=3))
    with pytest.raises(InvalidInput, match="num_devices: got 3, expected 1, 2, 4 or 8: cluster local has 8 devices"):
        taken.take_devices()
    taken.release()


def test_the_page_shows_the_files_of_its_example():
    page = (PROJECT / "docs" / "share_gpus.md").read_text()
    for name in ("crunch.py", "prefect.yaml"):
        assert (EXAMPLE / name).read_text() in page


class PlainSite(PrefectSite):
    """A pool of eight CPU devices, with the example of the page and the flows of `plain_flow.py`."""

    def deploy(self):
        shutil.copytree(EXAMPLE, self.folder, dirs_exist_ok=True)
        shutil.copy(Path(__file__).with_name("plain_flow.py"), self.folder / "plain_flow.py")
        project = yaml.safe_load((EXAMPLE / "prefect.yaml").read_text())
        common = {"kind": "cpu", "lease_directory": str(self.folder / "leases"), "grace_seconds": 2}
        variables = {"cluster": "gpu-box", "devices_per_node": 8, "max_restarts": 1}
        for name in ("plain", "asynchronous", "generating"):
            pool = {"name": "gpu-box", "job_variables": variables}
            project["deployments"].append({"name": name, "entrypoint": f"plain_flow.py:{name}", "work_pool": pool})
        for deployment in project["deployments"]:
            deployment["work_pool"]["name"] = "mesh"
            deployment["work_pool"]["job_variables"] |= common
        (self.folder / "prefect.yaml").write_text(json.dumps(project))
        self.prefect("work-pool", "create", "mesh", "--type", "gpu-mesh")
        self.prefect("work-queue", "create", "nightly", "--pool", "mesh")
        self.prefect("deploy", "--all")

    def start(self, flow, deployment=None, queue="default", job_variables=None, **parameters):
        """Ask for a flow run; returns its id."""
        found = self.ask(f"/deployments/name/{flow}/{deployment or flow}")
        asked = {"parameters": parameters, "job_variables": job_variables or {}, "work_queue_name": queue}
        return self.ask(f"/deployments/{found['id']}/create_flow_run", asked)["id"]

    def submitted(self, runs):
        """The runs in the order in which workers first gave them devices."""
        asked = {"logs": {"flow_run_id": {"any_": runs}}, "sort": "TIMESTAMP_ASC", "limit": 200}
        lines, offset = [], 0
        while page := self.ask("/logs/filter", asked | {"offset": offset}):
            lines += [line["flow_run_id"] for line in page if "submitting flow run" in line["message"]]
            offset += len(page)
        return list(dict.fromkeys(lines))

    def all_end(self, runs, seconds):
        """Wait for the end of all runs; returns how many ended in which state."""

        def states():
            found = self.ask("/flow_runs/filter", {"flow_runs": {"id": {"any_": runs}}})
            return Counter(run["state_type"] for run in found)

        self.until(lambda: states().keys() <= FINAL, seconds)
        return states()


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    with everything_up(PlainSite(tmp_path_factory.mktemp("plain"))) as started:
        yield started


def folder_of(site, name):
    folder = site.folder / name
    folder.mkdir()
    return str(folder)


def is_free(book):
    """Whether no run holds a device."""
    answer = book.acquire(8, Holder.now("probe", "probe"))
    if isinstance(answer, LeasedMesh):
        answer.release()
    return isinstance(answer, LeasedMesh)


@pytest.mark.all  # test_worker.py leases, and test_lease_queue.py has the order
@pytest.mark.slow
def test_plain_flows_share_devices_in_order_and_clean_up(site):
    """Three runs on eight devices, of which two need five; and one that is too large."""
    out = folder_of(site, "three")
    runs = [site.start("plain", job_variables={"num_devices": size}, out=out) for size in (5, 5, 3)]
    too_large = site.start("crunch", "one", job_variables={"num_devices": 9})
    line = "num_devices: got 9, expected 1 to 8: cluster gpu-box has 8 devices"
    assert site.until_state(too_large, "FAILED")["message"] == line
    assert site.all_end(runs, 180) == {"COMPLETED": 3}
    assert sorted(len(devices.split(",")) for devices in noted(out)) == [3, 5, 5]
    assert site.submitted(runs) == runs
    site.until(lambda: not any(site.left_of(run) for run in runs), 30)


@pytest.mark.slow
@pytest.mark.all
def test_thirty_plain_flows_all_end_though_a_worker_is_killed(site):
    """Of one to four devices on eight: none shares a device, all start in order of arrival, and nothing is left."""
    out = folder_of(site, "thirty")
    sizes = [1 + number * 7 % 4 for number in range(30)]
    runs = [site.start("plain", job_variables={"num_devices": size}, out=out, seconds=0.5) for size in sizes]
    site.until(lambda: len(noted(out)) >= 8 if Path(out, "attempts").exists() else False, 240)
    site.signal_worker(signal.SIGKILL)
    before = site.log()
    site.start_worker()
    example = site.start("crunch", "three", seconds=0.1)
    assert site.all_end([*runs, example], 540) == {"COMPLETED": 31}, before[-2000:]
    assert "runs on " in site.logged(example)
    assert site.submitted(runs) == runs
    assert Counter(len(devices.split(",")) for devices in noted(out)).keys() == {1, 2, 3, 4}
    assert len(noted(out)) >= 30
    site.until(lambda: not any(site.left_of(run) for run in runs), 20)
    book = LeaseBook(site.folder / "leases", ClusterShape("gpu-box", 1, 8, 1 << 30))
    site.until(lambda: is_free(book), 20)


@pytest.mark.slow
@pytest.mark.all
def test_a_plain_flow_is_cancelled_suspended_resumed_and_retried_as_any_run(site):
    """Its devices are free meanwhile; the waiting run's state names who holds them; a queue's priority counts."""
    out = folder_of(site, "ends")
    first = site.start("plain", job_variables={"num_devices": 8}, out=out, seconds=1, tasks=100)
    site.until(lambda: Path(out, "attempts").exists(), 90)
    nightly = site.start("crunch", "one", "nightly", seconds=0.1)
    site.until_state(nightly, "WaitingForLease")
    name = site.ask(f"/flow_runs/{first}")["name"]
    assert f"held by plain/{name} (pid " in site.state(nightly)["message"]
    second = site.start("crunch", "one", seconds=0.1)
    site.until_state(second, "WaitingForLease")

    site.set_state(first, SUSPENDED, force=True)
    assert site.all_end([nightly, second], 120) == {"COMPLETED": 2}
    assert site.submitted([nightly, second]) == [second, nightly]
    assert site.state(first)["name"] == "Suspended" and not site.left_of(first)
    site.ask(f"/flow_runs/{first}/resume", {})
    site.until(lambda: len(noted(out)) == 2, 90)
    site.prefect("flow-run", "cancel", first)
    site.until_state(first, "CANCELLED", 30)
    site.until(lambda: not site.left_of(first), 20)

    again = {}
    for flow in ("asynchronous", "generating"):
        folder = folder_of(site, flow)
        again[flow] = site.start(flow, job_variables={"num_devices": 2}, out=folder, failures=2)
    for flow, run in again.items():
        site.until_state(run, "FAILED", 120)
        assert "AwaitingRetry" in site.states(run), "it may start again once"
        site.set_state(run, AGAIN)
        site.until_state(run, "COMPLETED", 120)
        assert len(noted(str(site.folder / flow))) == 3
    site.until(lambda: site.unfinished_tasks() == [], 20)
    assert os.environ.get(DEVICES_VARIABLE) is None
