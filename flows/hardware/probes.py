"""Probed speeds on disk: a file for each kind of device, number of devices, format and installed software."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import fields
from importlib.util import find_spec
from pathlib import Path

from prefect_rlhf.blocks.lease_files import FileLock
from prefect_rlhf.errors.errors import InvalidInput, RlhfError
from prefect_rlhf.files.atomic_file import write_atomically
from prefect_rlhf.files.gpus import listed_gpus
from prefect_rlhf.flows.hardware.node_hardware import node_hardware
from prefect_rlhf.flows.hardware.profiles import Machine
from prefect_rlhf.placement.cost.speeds import KnownSpeeds, Speeds
from prefect_rlhf.placement.devices.lease import Lease
from prefect_rlhf.placement.models.model import Dtype
from prefect_rlhf.placement.plan import EngineKind

PROBES = Path("~/.prefect-rlhf/probes")
TOO_BUSY = 0.1
"""A later run probes again if other programs had more than this share of the cores."""
LOCK_SECONDS = 180.0  # a probe with the imports of its ranks, on a busy machine
PROBED_ENGINES: tuple[EngineKind, ...] = ("megatron", "vllm")
"""Engines whose decoding steps are timed; their modules have the same names."""

Say = Callable[[str], object]


def is_uniform(leased: Lease) -> bool:
    """Whether a node's speeds hold for every node of the cluster."""
    return not leased.cluster.node_speeds and len(set(leased.cluster.node_devices)) < 2


def machine_key(leased: Lease) -> str:
    """Return a name for everything that speeds depend on: devices, processor, driver, and installed software.

    A version that measures differently has other names, so it probes again.
    """
    machine = Machine.read(leased.kind, *dict.fromkeys(leased.node_devices))
    driver = gpu_driver() if leased.kind == "cuda" else ""
    measured = tuple(field.name for field in fields(Speeds))
    values = (machine, driver, leased.mesh.devices_per_node, measured)
    digest = hashlib.sha256(repr(values).encode()).hexdigest()[:16]
    return f"{machine.device}-{leased.mesh.devices_per_node}-{digest}"


def gpu_driver() -> str:
    """Return the version of the GPUs' driver; empty if its tool does not respond."""
    with suppress(InvalidInput):
        return listed_gpus()[0].driver
    return ""


def stored_speeds(key: str, say: Say) -> KnownSpeeds | None:
    """Return a machine's stored speeds; None without a file. `say` receives a line about a damaged file."""
    file = probe_file(key)
    if not file.is_file():
        return None
    try:
        known = KnownSpeeds.from_json(file.read_bytes(), str(file))
    except (InvalidInput, OSError) as error:
        say(f"the stored probe is ignored ({error})")
        return None
    return known if known.machine == key else None


def probe_file(key: str) -> Path:
    """Return the path of a machine's stored speeds."""
    return PROBES.expanduser() / f"{key}.json"


def forget_probes() -> int:
    """Remove all stored probes; return their number."""
    files = list(PROBES.expanduser().glob("*.json"))
    for file in files:
        file.unlink(missing_ok=True)
    return len(files)


def unprobed(known: KnownSpeeds | None, dtypes: Iterable[Dtype]) -> tuple[Dtype, ...]:
    """Return the formats that were never probed, or only while the machine was busy."""
    quiet = {speeds.dtype for speeds in known.by_dtype if speeds.busy <= TOO_BUSY} if known else set()
    return tuple(dtype for dtype in dict.fromkeys(dtypes) if dtype not in quiet)


def probed_speeds(leased: Lease, dtypes: Iterable[Dtype], say: Say) -> KnownSpeeds | None:
    """Return the speeds of the leased devices, measured now unless they are known.

    Each speed is the better of the stored and the new measurement. If the probe fails, or another run probes for longer
    than LOCK_SECONDS, `say` receives a line and the stored speeds are returned, if there are any.
    """
    key = machine_key(leased)
    with _probing(key) as is_free:
        known = stored_speeds(key, say)
        if not (missing := unprobed(known, dtypes)):
            return known
        if not is_free:
            say(f"another run has been probing this machine for {LOCK_SECONDS:g} s: its speeds are not known")
            return known
        before = {speeds.dtype: speeds for speeds in known.by_dtype} if known else {}
        try:
            now = {dtype: _probe(leased, dtype) for dtype in missing}
        except (RlhfError, OSError) as error:  # a run needs no probe
            reason = (str(error) or type(error).__name__).splitlines()[0]
            say(f"the probe of the devices failed, so plans use {'older speeds' if known else 'datasheets'} ({reason})")
            return known
        for dtype, speeds in now.items():
            say(f"probe: {speeds}{_load(speeds, dtype in before)}")
            before[dtype] = speeds.better(before[dtype]) if dtype in before else speeds
        known = KnownSpeeds(key, tuple(before.values()))
        write_atomically(probe_file(key), lambda part: part.write_text(known.to_json()))
        return known


def _load(speeds: Speeds, is_known: bool) -> str:
    if speeds.busy <= TOO_BUSY:
        return ""
    kept = "; of older and new speeds the better are used" if is_known else ""
    return f"; other programs had {speeds.busy:.0%} of the cores, so the next run probes again{kept}"


def _probe(leased: Lease, dtype: Dtype) -> Speeds:
    from prefect_rlhf.tasks.profiling.probe import probe  # imported here: a dry run needs no engine

    device = "cpu" if leased.kind == "cpu" else Machine.read(leased.kind, *dict.fromkeys(leased.node_devices)).device
    engines = [engine for engine in PROBED_ENGINES if find_spec(engine)]
    mesh = leased.mesh
    return probe(
        leased.kind,
        mesh.devices_per_node,
        dtype,
        engines,
        node_hardware(device, mesh.devices_per_node, None),
        num_nodes=mesh.num_nodes,
        node_devices=leased.node_devices,
        gpus=leased.gpus,
    )


@contextmanager
def _probing(key: str) -> Iterator[bool]:
    """Hold the lock of a machine's probe; yields False if another process holds it for LOCK_SECONDS."""
    deadline = time.monotonic() + LOCK_SECONDS
    while (lock := FileLock.take(PROBES.expanduser() / f"{key}.lock")) is None and time.monotonic() < deadline:
        time.sleep(0.2)
    try:
        yield lock is not None
    finally:
        if lock is not None:
            lock.release()
