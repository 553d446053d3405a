"""`prefect-rlhf doctor` has a line for each fact about a host, and a fault for each reason why a run would fail."""

import shutil
import sysconfig
from collections import namedtuple

import pytest
from huggingface_hub import constants

from prefect_rlhf.errors.errors import EngineFailed
from prefect_rlhf.flows.commands.cli import main
from prefect_rlhf.flows.hardware import checkup
from prefect_rlhf.flows.hardware.checkup import findings
from tests.flows.hardware.test_gpus import CPU_BUILDS, CUDA_BUILDS, H100, builds, driver, row  # noqa: F401  fixtures

Usage = namedtuple("Usage", "total used free")


@pytest.fixture
def engines(monkeypatch):
    """The imports and the engines' own check take seconds; here they answer at once.

    The list has the devices that the engines were asked for.
    """
    asked = []
    monkeypatch.setattr(checkup, "_imports", lambda kind: "imported")
    monkeypatch.setattr(checkup, "_engines", lambda *words: asked.append(words) or "ran")
    return asked


def faults(found):
    return {finding.subject: finding.text for finding in found if finding.is_fault}


def test_a_sound_gpu_host_has_no_fault_and_all_its_gpus_are_checked(driver, builds, engines, monkeypatch):  # noqa: F811
    driver(row(0), row(1))
    builds(CUDA_BUILDS)
    monkeypatch.setenv("CC", "gcc")
    found = list(findings(None, None))
    assert faults(found) == {} and engines == [(2, "cuda")]
    (gpus,) = [finding.text for finding in found if finding.subject == "GPUs"]
    assert gpus == "2 x NVIDIA H100 80GB HBM3, driver 580.95.05, at least 99% of their memory free"


def test_each_missing_part_of_a_gpu_host_is_a_line_and_no_engine_starts(driver, builds, engines, monkeypatch, tmp_path):  # noqa: F811
    driver(row(0, H100.replace("580.95.05", "550.1")))
    builds(CPU_BUILDS)
    monkeypatch.delenv("CC", raising=False)
    monkeypatch.setattr(shutil, "which", lambda name: None if name in ("gcc", "cc", "clang") else f"/bin/{name}")
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: Usage(64 << 20, 0, 64 << 20))
    assert faults(findings("cuda", 1)) == {
        "versions": "kind: got 'cuda', expected cpu, for which torch 2.13.0+cpu is built; "
        "`make setup-cuda` installs cuda builds",
        "GPUs": "driver: got '550.1', expected 580 or newer, which builds for CUDA 13 require",
        "compiler": "compiler: got 'no gcc, cc or clang', expected a C compiler, with which Triton builds its "
        "launchers",
        "shared memory": "shared memory: got '64 MiB in /dev/shm', expected at least 1024 MiB; "
        "in a container: --ipc=host",
    }
    assert engines == []


def test_a_compiler_without_the_headers_of_python_is_a_fault(driver, builds, engines, monkeypatch, tmp_path):  # noqa: F811
    driver(row(0))
    builds(CUDA_BUILDS)
    monkeypatch.setattr(sysconfig, "get_paths", lambda: {"include": str(tmp_path)})
    assert "expected the headers of Python" in faults(findings("cuda", None))["compiler"]


def test_the_hub_s_line_names_its_cache_and_never_the_token(engines, monkeypatch, tmp_path):
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(tmp_path / "token"))
    lines = []
    for offline, token in ((True, ""), (False, ""), (False, "hf_mine")):
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", offline)
        monkeypatch.setenv("HF_TOKEN", token)
        lines += [finding.text for finding in findings("cpu", 1) if finding.subject == "Hub"]
    assert lines[0] == f"HF_HUB_OFFLINE is set: only models and datasets in {tmp_path}/hub can be read by name"
    assert lines[1].endswith("free), not private or gated ones, without a token")
    assert lines[2].endswith("free), with a token")
    assert "hf_mine" not in lines[2]


def test_a_failed_engine_is_a_fault_with_its_reason(monkeypatch):
    def fails(*words):
        raise EngineFailed("rank 0 failed to build")

    monkeypatch.setattr(checkup, "_imports", lambda kind: "imported")
    monkeypatch.setattr(checkup, "_engines", fails)
    assert faults(findings("cpu", 1)) == {"engines": "rank 0 failed to build"}


def test_an_import_that_fails_is_a_fault_and_no_engine_starts(engines, monkeypatch):
    def fails(kind):
        raise EngineFailed("vllm.v1.worker.gpu_worker: ImportError: libcudart.so.13: no such file")

    monkeypatch.setattr(checkup, "_imports", fails)
    assert faults(findings("cpu", 1)) == {
        "imports": "vllm.v1.worker.gpu_worker: ImportError: libcudart.so.13: no such file"
    }
    assert engines == []


def test_the_status_says_whether_a_run_would_fail(engines, capfd):
    assert main(["doctor"]) == 0
    assert "ok     engines" in capfd.readouterr().out
    assert main(["doctor", "--kind", "cuda"]) == 1
    lines = capfd.readouterr().out.splitlines()
    assert lines[1].startswith("FAULT  versions") and lines[-1].startswith("log: ")


@pytest.mark.slow
@pytest.mark.all
def test_both_engines_run_on_the_cores_of_this_machine(capfd):
    assert main(["doctor"]) == 0
    assert "megatron and vllm ran on 2 devices" in capfd.readouterr().out
