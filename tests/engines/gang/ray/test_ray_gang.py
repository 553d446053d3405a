"""A gang over machines: what is wrong with a cluster is one line, and a node that is lost ends a call at once."""

import pickle
import signal
import subprocess
import sys
import threading
import time
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace

import pytest

from prefect_rlhf.engines.gang.processes.messages import GangSettings
from prefect_rlhf.engines.gang.ray import ray_gang, ray_places
from prefect_rlhf.engines.gang.ray.node_agent import NodeAgent
from prefect_rlhf.engines.gang.ray.ray_gang import RayGang, join_cluster
from prefect_rlhf.engines.gang.ray.ray_places import DEVICE_LABEL, _await_nodes, places_of
from prefect_rlhf.errors.errors import InvalidInput, RankLost
from prefect_rlhf.files.remote_path import CACHE_VARIABLE, local_path
from prefect_rlhf.tasks.ray_nodes import known_nodes
from tests.engines.gang.test_gang import Probe, call
from tests.flows.hardware.test_gpus import driver  # noqa: F401  a fixture
from tests.support.object_stores import names, s3_emulator
from tests.support.ray_nodes import joined, ray_nodes, why_not
from tests.support.small_disk import small_disk

OVER_NODES = [pytest.mark.skipif(bool(why_not()), reason=why_not()), pytest.mark.all, pytest.mark.slow]
ENVIRONMENT = {"OMP_NUM_THREADS": "1"}
PRELOAD = ("torch.distributed",)


def opened(nodes, *ranks_of_nodes, **settings):
    gang = GangSettings(sum(ranks_of_nodes), Probe, environment=ENVIRONMENT, preload=PRELOAD)
    return closing(RayGang(gang, ranks_of_nodes, nodes.address, **settings))


def refused(nodes, *ranks_of_nodes, **settings):
    """The one line that tells why such a gang cannot be."""
    with pytest.raises(InvalidInput) as caught, opened(nodes, *ranks_of_nodes, **settings):
        pass
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_without_ray_the_extra_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(InvalidInput, match=r"pip install '\.\[ray\]'"):
        join_cluster("10.0.0.1:6379")


H100, L4 = "NVIDIA H100 80GB HBM3", "NVIDIA L4"


def gpu_rows(count, name=H100, mig="Disabled", version="580.95.05"):
    return [f"{number}, GPU-{number}abc, {name}, {mig}, 81559, 81000, {version}" for number in range(count)]


@pytest.mark.parametrize(
    ("second", "kinds", "says"),
    [
        (gpu_rows(2), (), None),
        (gpu_rows(2, L4), ("h100", "l4"), None),
        (["No devices were found"], (), "kind: got 'cuda', expected a GPU; nvidia-smi reports: No devices were found"),
        (gpu_rows(1), (), "GPUs of the reservation: got 2, expected at most 1, the number of GPUs that CUDA_VISIBLE_"),
        (gpu_rows(2, mig="Enabled"), (), "kind: got 'cuda: GPU 0 has MIG enabled', expected whole GPUs"),
        (gpu_rows(1) + gpu_rows(2, L4)[1:], (), "kind: got 'cuda: GPU 0 is NVIDIA H100 80GB HBM3, GPU 1 is NVIDIA L4'"),
        (gpu_rows(2, version="570.1"), (), "driver: got '570.1', expected 580 or newer"),
        (gpu_rows(2, version="590.1"), (), "driver: got '590.1', expected 580.95.05, as on node 10.0.0.1"),
        (gpu_rows(2, L4), (), "got 'NVIDIA L4', expected NVIDIA H100 80GB HBM3, as on node 10.0.0.1; or node_kinds"),
        (gpu_rows(2, L4), ("h100", "h100"), "got 'NVIDIA L4', expected NVIDIA H100 80GB HBM3, as on node 10.0.0.1"),
    ],
)
def test_the_gpus_of_each_node_are_checked_and_compared(driver, monkeypatch, second, kinds, says):  # noqa: F811
    """By the agent of the node, with the driver's tool of the node; before a rank starts."""
    monkeypatch.setenv("CC", "gcc")

    def ask(question, arguments, seconds):
        for node, rows in enumerate((gpu_rows(2), second)):
            driver(*rows)
            yield pickle.loads(pickle.dumps(getattr(NodeAgent(f"10.0.0.{node + 1}"), question)(*arguments(node))))

    placed = SimpleNamespace(addresses=("10.0.0.1", "10.0.0.2"), ask=lambda *words, seconds: list(ask(*words, seconds)))
    kinds = kinds or ("", "")
    if says is None:
        return ray_gang._check_gpus(placed, (2, 2), kinds)
    with pytest.raises(InvalidInput) as caught:
        ray_gang._check_gpus(placed, (2, 2), kinds)
    assert str(caught.value).startswith(f"node 10.0.0.2: {says}") and "\n" not in str(caught.value)
    return None


class Never:
    """A reservation that is never granted."""

    def wait(self, seconds):
        return False


@pytest.mark.parametrize(
    ("lost", "back", "wanted", "error"),
    [
        ("", False, ("new", "old"), InvalidInput),  # was never there
        ("old", False, ("new", "old"), RankLost),
        ("old", True, ("new", "old", "old"), InvalidInput),  # is there, and they want one more
        ("old", False, ("new", "new"), InvalidInput),
        ("old", False, ("new", "old", "old"), InvalidInput),
    ],
)
def test_a_lost_node_is_not_reported_as_the_users_mistake(lost, back, wanted, error, monkeypatch):
    """A run with restarts left asks again, since it may be back by then; Ray keeps no more of it than its labels."""

    def node(address, device, alive=True):
        has = {"CPU": 2.0} if alive else {}
        return {"NodeManagerAddress": address, "Alive": alive, "Resources": has, "Labels": {DEVICE_LABEL: device}}

    known = [node("10.0.0.1", "new"), *([node("10.0.0.2", lost, False)] if lost else [])]
    known += [node("10.0.0.2", lost)] if back else []
    monkeypatch.setitem(sys.modules, "ray", SimpleNamespace(nodes=lambda: known))
    places = places_of([2] * len(wanted), "cpu", wanted)
    with pytest.raises(error) as caught:
        _await_nodes(Never(), "10.0.0.9:6379", places, print)
    wants = f"{len(wanted)} nodes with {', '.join(f'2 CPUs ({device})' for device in wanted)}"
    assert "10.0.0.1 2 CPUs (new)" in str(caught.value) and wants in str(caught.value)


@pytest.fixture(scope="class")
def nodes():
    """Two machines with two devices each; a process can have joined one cluster at a time."""
    with ray_nodes((2, 2)) as nodes, joined(nodes):
        yield nodes


class TestTwoMachines:
    pytestmark = OVER_NODES

    @pytest.mark.parametrize("wanted", [(3, 1), (1, 1, 1)])
    def test_a_request_above_the_cluster_names_its_resources(self, nodes, wanted, monkeypatch):
        monkeypatch.setattr(ray_places, "PLACE_SECONDS", 2.0)
        said = refused(nodes, *wanted)
        assert f"{len(wanted)} nodes with {', '.join(f'{count} CPUs' for count in wanted)}" in said
        assert all(f"{address} 2" in said for address in nodes.addresses)

    def test_a_gang_waits_for_held_resources(self, nodes, monkeypatch):
        lines = []
        with opened(nodes, 2, 1) as first:
            with monkeypatch.context() as patch:
                patch.setattr(ray_places, "PLACE_SECONDS", 2.0)
                patch.setattr(ray_places, "HELD_SECONDS", 3.0)
                assert "held by others for" in refused(nodes, 1, 1, say=lines.append)
            assert "held by others" in lines[0]
            assert call(first, Probe.place) == {0: (0, 3), 1: (1, 3), 2: (2, 3)}
        with opened(nodes, 1, 1) as then:
            assert then.size == 2

    def test_a_dead_holder_frees_its_places(self, nodes):
        holder = subprocess.Popen(
            [sys.executable, "-c", HOLDER, nodes.address],
            stdout=subprocess.PIPE,
            text=True,
            cwd=Path(__file__).parents[4],
        )
        assert "holding" in holder.stdout.readline()
        holder.send_signal(signal.SIGKILL)
        holder.wait()
        with opened(nodes, 2, 2) as gang:
            assert gang.size == 4

    def test_a_node_with_other_versions_is_named(self, nodes, monkeypatch):
        monkeypatch.setattr(ray_gang, "versions", lambda: {"Python": "3.11.7", "torch": "1.0"})
        said = refused(nodes, 1, 1)
        assert said.startswith(tuple(f"node {address}" for address in nodes.addresses))
        assert "expected 1.0, the controller's version" in said

    def test_a_firewall_between_two_nodes_is_named(self, nodes):
        """One that sends nothing gets no answers either; which of them is asked first, Ray decides."""
        one, other = nodes.addresses
        nodes.block(0, other)
        try:
            said = refused(nodes, 1, 1)
            assert f"{one} cannot reach {other}:" in said or f"{other} cannot reach {one}:" in said
        finally:
            nodes.unblock(0, other)

    def test_a_folder_that_not_every_machine_sees_is_named(self, nodes, tmp_path):
        """A disk that is mounted here alone, a folder that is not there, and one that all see."""
        with small_disk(tmp_path / "own", 1 << 20) as folder:
            said = refused(nodes, 1, 1, shared=folder)
            assert f"output_dir: got '{folder}', expected storage that all machines of the run share" in said
            assert "does not see the file of" in said and not list(folder.iterdir())
        assert "cannot (No such file or directory)" in refused(nodes, 1, 1, shared=tmp_path / "none")
        with opened(nodes, 1, 1, shared=tmp_path) as gang:
            assert gang.size == 2 and not [path for path in tmp_path.iterdir() if path.is_file()]

    def test_a_store_that_not_every_machine_reaches_is_named(self, nodes, tmp_path, monkeypatch):
        """The nodes have its address and their credentials from the controller."""
        monkeypatch.setenv(CACHE_VARIABLE, str(tmp_path))
        with nodes.another_address() as address, s3_emulator(monkeypatch, address) as url:
            folder = local_path(f"{url}/runs/amber", "output_dir")
            nodes.block(0, address)
            try:
                said = refused(nodes, 1, 1, shared=folder)
            finally:
                nodes.unblock(0, address)
            assert f"output_dir: got '{url}/runs/amber', expected a folder that every node may write: " in said
            assert f"node {nodes.addresses[0]} cannot (expected a store that answers at http://{address}:" in said
            with opened(nodes, 1, 1, shared=folder) as gang:
                assert gang.size == 2 and names(url) == []


HOLDER = """
import sys, time
from tests.engines.gang.ray.test_ray_gang import GangSettings, Probe, RayGang
gang = RayGang(GangSettings(4, Probe, environment={"OMP_NUM_THREADS": "1"}, preload=("torch",)), (2, 2), sys.argv[1])
print("holding", flush=True)
time.sleep(600)
"""


class TestKindsOfNodes:
    """Two machines of one kind and one of another, which has more devices."""

    pytestmark = OVER_NODES

    def test_each_node_of_a_gang_is_of_the_kind_that_is_asked_for(self, monkeypatch):
        """In both orders, and whatever Ray would have taken; what the cluster has not is refused with what it has."""
        monkeypatch.setattr(ray_places, "PLACE_SECONDS", 5.0)
        with ray_nodes((1, 1, 2), ("old", "old", "new")) as nodes, joined(nodes):
            for kinds in (("new", "old"), ("old", "new"), ("old", "old")):
                with opened(nodes, 1, 1, node_devices=kinds) as gang:
                    there = [gang._processes.where(rank).removeprefix(" on node ") for rank in (0, 1)]
                    assert tuple(nodes.kinds[nodes.addresses.index(node)] for node in there) == kinds
            said = refused(nodes, 1, 1, node_devices=("new", "new"))
            assert "expected 2 nodes with 1 CPUs (new), 1 CPUs (new)" in said
            assert f"{nodes.addresses[2]} 2 CPUs (new)" in said
            lines = [str(node).partition(": ")[2] for node in known_nodes(nodes.address)]
            assert sorted(lines) == ["0 CPUs, 0 GPUs", *["1 CPUs, 0 GPUs, old"] * 2, "2 CPUs, 0 GPUs, new"]


class TestLostNodes:
    """On three machines, each lost in its way, while every rank is in a call of a minute."""

    pytestmark = OVER_NODES

    def test_nodes_that_die_or_are_cut_off_end_calls_and_the_others_carry_the_next_gang(self):
        with ray_nodes((1, 1, 1)) as nodes, joined(nodes):
            with opened(nodes, 1, 1, 1) as gang:
                assert self.lost(gang, lambda: nodes.kill(0)) == nodes.addresses[0]
            with opened(nodes, 1, 1) as gang:
                assert self.lost(gang, lambda: nodes.cut(1)) == nodes.addresses[1]
            with opened(nodes, 1) as gang:
                nodes.kill_head()
                call(gang, Probe.sleep, 75.0, seconds=120.0)  # Ray would end processes after a minute without it
                assert call(gang, Probe.place) == {0: (0, 1)}, "nothing is asked of the head after the start"

    def lost(self, gang, harm):
        """The address of the node that is said to be lost, once `harm` was done to it."""
        began = time.monotonic()
        threading.Timer(1.0, harm).start()
        with pytest.raises(RankLost) as caught:
            call(gang, Probe.sleep, 60.0, seconds=120.0)
        assert time.monotonic() - began < 60, "before any deadline"
        return str(caught.value).partition("on node ")[2].split()[0]
