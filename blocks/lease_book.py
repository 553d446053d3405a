"""The lease book of a cluster: one locked file per device, so that a dead holder holds nothing.

A lock (flock) belongs to the open file, not to the process: a child that inherits the descriptors keeps the devices
even when its parent is killed, and the kernel frees them when the last such process is gone.
"""

from __future__ import annotations

import fcntl
import json
import os
import time
import uuid
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from datetime import datetime
from pathlib import Path

from prefect_rlhf.placement.errors import InvalidInput, RlhfError
from prefect_rlhf.placement.mesh import ClusterShape, Device, DeviceMesh

BOOK_LOCK_SECONDS = 5.0  # the book is locked for some file operations; longer means that its holder is stopped


@dataclass(frozen=True, slots=True)
class Holder:
    """The holder of a device: the flow run and a process of it, or of its worker, and since when (ISO 8601)."""

    flow_run_id: str
    flow_run: str
    pid: int
    since: str

    @classmethod
    def now(cls, flow_run_id: str, flow_run: str) -> Holder:
        return cls(flow_run_id, flow_run, os.getpid(), datetime.now().astimezone().isoformat(timespec="seconds"))

    def __str__(self) -> str:
        return f"{self.flow_run} since {datetime.fromisoformat(self.since):%H:%M}"


@dataclass(frozen=True, slots=True)
class Busy:
    """A mesh that cannot be had now; try again. `holders` says whom to wait for."""

    wanted: str
    cluster: str
    holders: tuple[str, ...]

    def __str__(self) -> str:
        holders = "; ".join(self.holders) or "another process"
        return f"waiting for {self.wanted} of cluster {self.cluster}: held by {holders}"


@dataclass(slots=True)
class LeasedMesh:
    """A mesh whose devices are locked by this process. Pass `descriptors` on to a child that must keep them."""

    id: str
    mesh: DeviceMesh
    descriptors: tuple[int, ...]

    def release(self) -> None:
        """Close this process's copies. The devices are free when no child holds copies either. Idempotent."""
        for descriptor in self.descriptors:
            os.close(descriptor)
        self.descriptors = ()


class LeaseBook:
    """The leases of one cluster on this machine, kept in `directory`.

    >>> import tempfile
    >>> book = LeaseBook(Path(tempfile.mkdtemp()), ClusterShape("desk", 1, 2, 8 << 30))
    >>> leased = book.acquire("n0:0-1", Holder("id", "ppo/amber-fox", 1, "2026-01-01T10:32:00"))
    >>> print(book.acquire(1, Holder.now("id", "ppo/late-owl")))
    waiting for 1 device of cluster desk: held by ppo/amber-fox since 10:32
    >>> leased.release()
    """

    def __init__(self, directory: Path, cluster: ClusterShape) -> None:
        self.directory = directory.expanduser() / cluster.name
        self.cluster = cluster

    def acquire(self, wanted: str | int, holder: Holder) -> LeasedMesh | Busy:
        """Lock a mesh, all of its devices or none: the named one, or an aligned one of `wanted` devices.

        Raises InvalidInput when the cluster can never give that.
        """
        candidates = self.candidates(wanted)
        with self._book_lock():
            free = self._lock_free_devices()
            mesh = self._choose(candidates, free)
            locked = () if mesh is None else tuple(free.pop(device) for device in mesh.devices())
            for descriptor in free.values():
                os.close(descriptor)
            if mesh is None:
                return self._busy(wanted, candidates)
            for descriptor in locked:
                _write(descriptor, holder)
        return LeasedMesh(uuid.uuid4().hex[:12], mesh, locked)

    def candidates(self, wanted: str | int) -> tuple[DeviceMesh, ...]:
        """Return every mesh that would do, in device order. Raises InvalidInput when there is none."""
        if isinstance(wanted, str):
            return (self.cluster.check_mesh(DeviceMesh.parse(wanted)),)
        per_node, num_nodes = self.cluster.devices_per_node, self.cluster.num_nodes
        if wanted >= per_node and wanted % per_node == 0 and wanted // per_node <= num_nodes:
            nodes = wanted // per_node
            return tuple(DeviceMesh(first, nodes, 0, per_node) for first in range(num_nodes - nodes + 1))
        if 0 < wanted < per_node and wanted & (wanted - 1) == 0:
            firsts = range(0, per_node - wanted + 1, wanted)
            return tuple(DeviceMesh(node, 1, first, wanted) for node in range(num_nodes) for first in firsts)
        sizes = "a power of two below" if per_node > 1 else "a multiple of"
        most = f"at most {num_nodes} x {per_node} in cluster {self.cluster.name}"
        raise InvalidInput("num_devices", wanted, f"{sizes} {per_node}, or whole nodes: {most}")

    def _choose(self, candidates: tuple[DeviceMesh, ...], free: Mapping[Device, int]) -> DeviceMesh | None:
        """Return the free candidate in the smallest free aligned block: large blocks stay whole for large runs."""
        fitting = [mesh for mesh in candidates if all(device in free for device in mesh.devices())]
        return min(fitting, key=lambda mesh: self._free_block(mesh, free), default=None)

    def _free_block(self, mesh: DeviceMesh, free: Mapping[Device, int]) -> int:
        """Return the number of devices in the largest aligned block of one node around `mesh` that is wholly free."""
        width = mesh.devices_per_node
        while width < self.cluster.devices_per_node:
            first = mesh.first_device // (2 * width) * (2 * width)
            last = min(first + 2 * width, self.cluster.devices_per_node)
            if any(Device(mesh.first_node, index) not in free for index in range(first, last)):
                break
            width *= 2
        return width

    def _lock_free_devices(self) -> dict[Device, int]:
        """Lock every free device of the cluster; the caller closes what it does not keep."""
        locked = {}
        for device in self.cluster.whole.devices():
            descriptor = os.open(self._path(device), os.O_RDWR | os.O_CREAT, 0o666)
            if _try_lock(descriptor):
                locked[device] = descriptor
            else:
                os.close(descriptor)
        return locked

    def _busy(self, wanted: str | int, candidates: tuple[DeviceMesh, ...]) -> Busy:
        words = wanted if isinstance(wanted, str) else f"{wanted} device{'s' if wanted > 1 else ''}"
        devices = {device for mesh in candidates for device in mesh.devices()}
        holders = {str(holder) for device in devices if (holder := self._holder_of(device))}
        return Busy(words, self.cluster.name, tuple(sorted(holders)))

    def _holder_of(self, device: Device) -> Holder | None:
        """Return what the last holder of `device` wrote; None when it is free now, or nothing was written."""
        descriptor = os.open(self._path(device), os.O_RDWR)
        try:
            return None if _try_lock(descriptor) else _read(descriptor)
        finally:
            os.close(descriptor)

    def _path(self, device: Device) -> Path:
        return self.directory / f"n{device.node}-{device.index}.lease"

    @contextmanager
    def _book_lock(self) -> Iterator[None]:
        """Let one process at a time look for free devices, so that nobody takes a search for a lease."""
        self.directory.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(self.directory / "book.lock", os.O_RDWR | os.O_CREAT, 0o666)
        deadline = time.monotonic() + BOOK_LOCK_SECONDS
        try:
            while not _try_lock(descriptor):
                if time.monotonic() > deadline:
                    raise RlhfError(
                        f"{self.directory}/book.lock: locked for {BOOK_LOCK_SECONDS:.0f} s by a stopped process"
                    )
                time.sleep(0.01)
            yield
        finally:
            os.close(descriptor)


def _try_lock(descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _write(descriptor: int, holder: Holder) -> None:
    os.ftruncate(descriptor, 0)
    os.pwrite(descriptor, json.dumps(asdict(holder)).encode(), 0)


def _read(descriptor: int) -> Holder | None:
    try:
        return Holder(**json.loads(os.pread(descriptor, 4096, 0)))
    except (TypeError, ValueError):
        return None
