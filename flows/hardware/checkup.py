"""Checks a host before its first run: builds, driver, compiler, memory, and each engine on all devices together."""

from __future__ import annotations

import os
import platform
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib.util import find_spec

from prefect_rlhf.blocks.lease import LeaseTimeout, lease
from prefect_rlhf.errors.errors import InvalidInput, RlhfError
from prefect_rlhf.errors.install_command import install_command
from prefect_rlhf.files.engine_builds import chosen_kind, why_no_gpu
from prefect_rlhf.files.gpus import check_gpus, visible_gpus
from prefect_rlhf.files.host import compiler, locked_memory, shared_memory
from prefect_rlhf.files.hub.snapshots import in_words
from prefect_rlhf.files.installed import installed_version
from prefect_rlhf.flows.hardware.device_kind import local_cluster
from prefect_rlhf.flows.hardware.installed_engines import check_builds, check_engines
from prefect_rlhf.flows.hardware.node_hardware import node_hardware
from prefect_rlhf.flows.hardware.probes import PROBED_ENGINES
from prefect_rlhf.flows.hardware.profiles import PACKAGES, Machine
from prefect_rlhf.placement.cost.datasheets.hardware import GIB
from prefect_rlhf.placement.devices.lease import Lease
from prefect_rlhf.placement.devices.mesh import Backend
from prefect_rlhf.placement.memory.bytes import usable_bytes


@dataclass(frozen=True, slots=True)
class Finding:
    """A fact about the host. A run fails with `is_fault`."""

    subject: str
    text: str
    is_fault: bool = False

    def __str__(self) -> str:
        return f"{'FAULT' if self.is_fault else 'ok':<6} {self.subject:<14} {self.text}"


def findings(kind: Backend | None, devices: int | None) -> Iterator[Finding]:
    """Check this host for runs on `devices` of `kind`; yield each finding as soon as it is known, quick checks first.

    `kind` defaults as for a run, `devices` to all GPUs, or two cores. The engines are not started if an earlier check
    fails.
    """
    chosen = chosen_kind(kind)
    yield Finding("kind", chosen if kind or chosen == "cuda" else f"cpu; {why_no_gpu()}")
    quick = [_finding("versions", lambda: _versions(chosen))]
    number = devices or min(2, len(os.sched_getaffinity(0)))
    if chosen == "cuda":
        quick.append(_finding("GPUs", lambda: _gpus(devices)))
        quick.append(_finding("compiler", compiler))
        quick.append(_finding("locked memory", locked_memory))
        quick.append(_finding("shared memory", shared_memory))
        if not quick[1].is_fault:
            number = devices or len(visible_gpus())
    yield from quick
    yield Finding("several nodes", _several_nodes())
    yield Finding("Hub", in_words())
    if any(found.is_fault for found in quick):
        return
    yield (imports := _finding("imports", lambda: _imports(chosen)))
    if not imports.is_fault:
        yield _finding("engines", lambda: _engines(number, chosen))


def _finding(subject: str, check: Callable[[], str]) -> Finding:
    """Return what `check` found, or its error as a fault."""
    try:
        return Finding(subject, check())
    except RlhfError as error:
        return Finding(subject, str(error).splitlines()[0], is_fault=True)


def _versions(kind: Backend) -> str:
    check_engines(kind)
    check_builds()
    found = {name: seen for name in PACKAGES if (seen := installed_version(name))}
    named = [f"{name} {seen}" for name, seen in {"Python": platform.python_version(), **found}.items()]
    return ", ".join(named) + ("" if find_spec("vllm") else "; vLLM is not installed: Megatron generates")


def _several_nodes() -> str:
    if find_spec("ray") is None:
        return f"Ray is not installed, so runs on several nodes are refused: {install_command('ray')}"
    return f"Ray {installed_version('ray')}"


def _gpus(devices: int | None) -> str:
    seen = visible_gpus()
    check_gpus(seen, range(devices or len(seen)))
    if not seen:
        raise InvalidInput("CUDA_VISIBLE_DEVICES", os.environ.get("CUDA_VISIBLE_DEVICES"), "the number of a GPU")
    for gpu in seen[:devices]:
        needed = usable_bytes(gpu.plan_bytes, "cuda")
        if gpu.free_bytes < needed:
            expected = f"at least {needed / GIB:.1f}, which a plan may use: `nvidia-smi` lists its processes"
            raise InvalidInput(f"GPU {gpu.number}", f"{gpu.free_bytes / GIB:.1f} GiB free", expected)
    free = min(gpu.free_bytes / gpu.memory_bytes for gpu in seen)
    return f"{len(seen)} x {seen[0].name}, driver {seen[0].driver}, at least {free:.0%} of their memory free"


def _imports(kind: Backend) -> str:
    """Import everything that ranks of `kind` import, in a separate process: a bad build shows within seconds."""
    from prefect_rlhf.tasks.profiling.probe import import_as_ranks  # imported here: the quick checks need no engine

    engines = [engine for engine in PROBED_ENGINES if find_spec(engine)]
    return f"the {import_as_ranks(kind, engines)} modules of {' and '.join(engines)} that ranks import"


def _engines(number: int, kind: Backend) -> str:
    """Lease the devices, and time products, a sum between all ranks, and a small model in each installed engine."""
    cluster = local_cluster(number, kind)
    try:
        with lease(cluster, number, kind=kind, wait_seconds=0, flow_run="doctor", say=lambda line: None) as leased:
            return _probed(leased)
    except LeaseTimeout as error:
        return f"not checked: {error}"


def _probed(leased: Lease) -> str:
    from prefect_rlhf.tasks.profiling.probe import probe  # imported here: the quick checks need no engine

    engines = [engine for engine in PROBED_ENGINES if find_spec(engine)]
    hardware = node_hardware(Machine.read(leased.kind).device, leased.mesh.devices_per_node, None)
    speeds = probe(leased.kind, leased.mesh.devices_per_node, "bfloat16", engines, hardware, gpus=leased.gpus)
    return f"{' and '.join(engines)} ran on {leased.mesh.num_devices} devices: {speeds}"
