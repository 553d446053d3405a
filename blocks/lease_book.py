"""The lease book of a cluster: one locked file per device, so that a dead holder holds nothing.

A lock (flock) belongs to the open file, not to the process: a child that inherits the descriptors keeps the devices
even when its parent is killed, and the kernel frees them when the last such process is gone.
"""

from __future__ import annotations

import json
import os
import time
import uuid
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from datetime import datetime
from pathlib import Path

from prefect_rlhf.blocks.lease_files import FileLock, make_shared_folder, open_shared, try_lock
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

    def acquire(self, wanted: str | int, holder: Holder, at_least: int = 0) -> LeasedMesh | Busy:
        """Lock a mesh, all of its devices or none: the named one, or an aligned one of `wanted` devices.

        With `at_least`, one that is not wholly free makes do with a smaller one, the largest that is free and has so
        many devices. Raises InvalidInput when the cluster can never give that.
        """
        candidates, *smaller = self.acceptable(wanted, at_least)
        with self._book_lock():
            free = self._lock_free_devices()
            chosen = (self._choose(meshes, free) for meshes in (candidates, *smaller))
            mesh = next((mesh for mesh in chosen if mesh is not None), None)
            locked = () if mesh is None else tuple(free.pop(device) for device in mesh.devices())
            for descriptor in free.values():
                os.close(descriptor)
            if mesh is None:
                return self._busy(wanted, candidates)
            for descriptor in locked:
                _write(descriptor, holder)
        return LeasedMesh(uuid.uuid4().hex[:12], mesh, locked)

    def take_run(self, flow_run_id: str) -> FileLock | None:
        """Lock a flow run, so that one process at a time may start it; None while another has it."""
        self._make_folder()
        return FileLock.take(self.directory / "runs" / f"{flow_run_id}.lock")

    def _make_folder(self) -> None:
        make_shared_folder(self.directory.parent)
        make_shared_folder(self.directory)

    def acceptable(self, wanted: str | int, at_least: int = 0) -> tuple[tuple[DeviceMesh, ...], ...]:
        """Return meshes of the size wanted, then those of each smaller one that `acquire` would make do with.

        Raises InvalidInput when the cluster can never give that.
        """
        candidates = self.candidates(wanted)
        return (candidates, *(self._smaller(candidates, at_least) if at_least else ()))

    def candidates(self, wanted: str | int) -> tuple[DeviceMesh, ...]:
        """Return every mesh that would do, in device order. Raises InvalidInput when there is none."""
        if isinstance(wanted, str):
            return (self.cluster.check_mesh(DeviceMesh.parse(wanted)),)
        if meshes := self._meshes(wanted):
            return meshes
        per_node, num_nodes = self.cluster.devices_per_node, self.cluster.num_nodes
        sizes = "a power of two below" if per_node > 1 else "a multiple of"
        most = f"at most {num_nodes} x {per_node} in cluster {self.cluster.name}"
        raise InvalidInput("num_devices", wanted, f"{sizes} {per_node}, or whole nodes: {most}")

    def _meshes(self, size: int) -> tuple[DeviceMesh, ...]:
        """Return every aligned mesh of `size` devices, in device order."""
        per_node, num_nodes = self.cluster.devices_per_node, self.cluster.num_nodes
        if size >= per_node and size % per_node == 0 and size // per_node <= num_nodes:
            nodes = size // per_node
            return tuple(DeviceMesh(first, nodes, 0, per_node) for first in range(num_nodes - nodes + 1))
        if 0 < size < per_node and size & (size - 1) == 0:
            firsts = range(0, per_node - size + 1, size)
            return tuple(DeviceMesh(node, 1, first, size) for node in range(num_nodes) for first in firsts)
        return ()

    def _smaller(self, wanted: tuple[DeviceMesh, ...], at_least: int) -> tuple[tuple[DeviceMesh, ...], ...]:
        """Return the meshes inside those wanted that have `at_least` devices, largest first."""
        most = wanted[0].num_devices
        if at_least > most:
            raise InvalidInput("min_devices", at_least, f"at most the {most} devices that are asked for")
        by_size = (self._meshes(size) for size in range(most - 1, at_least - 1, -1))
        return tuple(
            tuple(mesh for mesh in meshes if any(whole.contains(mesh) for whole in wanted)) for meshes in by_size
        )

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
            descriptor = open_shared(self._path(device))
            if try_lock(descriptor):
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
        descriptor = open_shared(self._path(device))
        try:
            return None if try_lock(descriptor) else _read(descriptor)
        finally:
            os.close(descriptor)

    def _path(self, device: Device) -> Path:
        return self.directory / f"n{device.node}-{device.index}.lease"

    @contextmanager
    def _book_lock(self) -> Iterator[None]:
        """Let one process at a time look for free devices, so that nobody takes a search for a lease."""
        self._make_folder()
        descriptor = open_shared(self.directory / "book.lock")
        deadline = time.monotonic() + BOOK_LOCK_SECONDS
        try:
            while not try_lock(descriptor):
                if time.monotonic() > deadline:
                    raise RlhfError(
                        f"{self.directory}/book.lock: locked for {BOOK_LOCK_SECONDS:.0f} s by a stopped process"
                    )
                time.sleep(0.01)
            yield
        finally:
            os.close(descriptor)


def _write(descriptor: int, holder: Holder) -> None:
    os.ftruncate(descriptor, 0)
    os.pwrite(descriptor, json.dumps(asdict(holder)).encode(), 0)


def _read(descriptor: int) -> Holder | None:
    try:
        holder = Holder(**json.loads(os.pread(descriptor, 4096, 0)))
        str(holder)  # any user may have written anything
    except (TypeError, ValueError):
        return None
    return holder
