"""Each fault of a GPU host costs a line of `prefect-rlhf doctor`, and a line of a run before anything is built."""

import importlib.util
import shutil
from dataclasses import dataclass
from types import SimpleNamespace

import pytest

from prefect_rlhf.blocks import lease as leases
from prefect_rlhf.errors.errors import RlhfError
from prefect_rlhf.flows.hardware import checkup
from prefect_rlhf.flows.hardware.checkup import findings
from prefect_rlhf.flows.hardware.device_kind import check_leased_gpus, local_cluster
from prefect_rlhf.flows.hardware.installed_engines import check_engines
from prefect_rlhf.placement.devices.lease import Lease
from prefect_rlhf.placement.devices.mesh import ClusterShape
from prefect_rlhf.tasks.running.device_memory import check_device_memory
from tests.flows.hardware.test_gpus import CPU_BUILDS, CUDA_BUILDS, H100, builds, driver, row  # noqa: F401  fixtures
from tests.tasks.running.test_device_memory import Answers

SOUND = (row(0), row(1))
ABSENT = {"driver": ("nvidia-smi",), "compiler": ("gcc", "cc", "clang")}


@dataclass(frozen=True)
class Host:
    """A host for two GPUs: rows of the driver's tool, builds, and parts that it lacks."""

    line: str
    """The beginning of the line of the doctor and of a run."""
    rows: tuple[str, ...] = SOUND
    versions: tuple[tuple[str, str], ...] = tuple(CUDA_BUILDS.items())
    lacks: str = ""


HOSTS = {
    "no driver": Host("kind: got 'cuda', expected a machine with nvidia-smi", lacks="driver"),
    "no GPU": Host("kind: got 'cuda', expected a GPU; nvidia-smi reports: No dev", ("No devices were found",)),
    "old driver": Host(
        "driver: got '570.1', expected 580 or newer", tuple(row(i, H100.replace("580.95.05", "570.1")) for i in (0, 1))
    ),
    "MIG": Host(
        "kind: got 'cuda: GPU 1 has MIG enabled', expected whole GPUs", (row(0), row(1, H100.replace("Disa", "Ena")))
    ),
    "mixed GPUs": Host(
        "kind: got 'cuda: GPU 0 is NVIDIA H100 80GB HBM3, GPU 1 is NVIDIA L4', expected GPUs of a single kind",
        (row(0), row(1, H100.replace("H100 80GB HBM3", "L4"))),
    ),
    "no bfloat16": Host(
        "kind: got 'cuda: GPU 0 is Tesla T4, of compute capability 7.5', expected 8 or newer",
        tuple(row(i, "Tesla T4, Disabled, 15360, 15000, 580.95.05, 7.5") for i in (0, 1)),
    ),
    "wrong wheels": Host(
        "kind: got 'cuda', expected cpu, for which torch 2.13.0+cpu is built", versions=tuple(CPU_BUILDS.items())
    ),
    "no compiler": Host("compiler: got 'no gcc, cc or clang', expected a C compiler", lacks="compiler"),
    "small shared memory": Host("shared memory: got '64 MiB in /dev/shm', expected at least 1024 MiB", lacks="shm"),
}


@pytest.fixture
def on(driver, builds, monkeypatch):  # noqa: F811
    """Become a host, where no engine may start."""

    def become(host):
        driver(*host.rows)
        builds(dict(host.versions))
        monkeypatch.setattr(checkup, "_imports", lambda *_: "imported")
        monkeypatch.setattr(checkup, "_engines", lambda *_: pytest.fail("the doctor started an engine"))
        monkeypatch.delenv("CC", raising=False)
        monkeypatch.setattr(
            shutil, "which", lambda name: None if name in ABSENT.get(host.lacks, ()) else f"/bin/{name}"
        )
        size = (64 << 20) if host.lacks == "shm" else 64 << 30
        monkeypatch.setattr(shutil, "disk_usage", lambda folder: SimpleNamespace(total=size, free=size))

    return become


def lines_of_doctor():
    return [finding.text for finding in findings("cuda", 2) if finding.is_fault]


def begin_a_run():
    """What a run does first: builds, then a cluster of its GPUs, then the host of its lease."""
    check_engines("cuda")
    cluster = local_cluster(2, "cuda")
    check_leased_gpus(Lease("local", "a", cluster, cluster.whole, cluster.whole.devices(), "cuda"))


@pytest.mark.parametrize("name", HOSTS)
def test_a_fault_costs_a_line_of_the_doctor_and_of_a_run(on, name):
    host = HOSTS[name]
    on(host)
    with pytest.raises(RlhfError) as refused:
        begin_a_run()
    for line in (*lines_of_doctor(), str(refused.value)):
        assert line.startswith(host.line) and "\n" not in line
    assert lines_of_doctor()


def test_a_sound_host_gives_no_warning(on, monkeypatch):
    on(Host(""))
    monkeypatch.setattr(checkup, "_engines", lambda *_: "ran")
    begin_a_run()
    assert lines_of_doctor() == []


def test_a_gpu_that_another_process_fills(on):
    """A run waits for a minute first."""
    on(Host("", (row(0), row(1, H100.replace("81000", "4096")))))
    assert [line.split(", which")[0] for line in lines_of_doctor()] == [
        "GPU 1: got '4.0 GiB free', expected at least 74.4"
    ]
    shape = ClusterShape("box", 1, 1, 79 << 30)
    held = Lease("local", "1", shape, shape.whole, shape.whole.devices(), "cuda")
    with pytest.raises(RlhfError, match="n0:0 has 4.0 GiB free, and plans may use"):
        check_device_memory(held, Answers(79.15, free=(0.05,)), 1.0, wait_seconds=0.01)


def test_several_nodes_without_ray(on, monkeypatch):
    """The doctor knows no plan, so its line is no fault."""
    on(Host(""))
    monkeypatch.setattr(checkup, "_engines", lambda *_: "ran")
    found = importlib.util.find_spec
    for module in (checkup, leases):
        monkeypatch.setattr(module, "find_spec", lambda name, *_: None if name == "ray" else found(name))
    (line,) = [finding for finding in findings("cuda", 2) if finding.subject == "several nodes"]
    assert not line.is_fault and line.text.startswith("Ray is not installed, so runs on several nodes are refused")
    with pytest.raises(RlhfError, match="num_nodes: got 2, expected 1, or Ray on each node"):
        leases.require_ray(ClusterShape("two", 2, 8, 79 << 30))
