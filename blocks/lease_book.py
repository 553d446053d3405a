"""The lease book of a cluster: one locked file per device, so that a dead holder cannot keep a device.

A lock (flock) belongs to the open file, not to the process: a child that inherits the descriptors keeps the devices
even if its parent is killed, and the kernel frees them after the last such process.
"""

from __future__ import annotations

import json
import os
import time
import uuid
from collections.abc import Iterator, Sequence, Set
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from datetime import datetime
from pathlib import Path

from prefect_rlhf.blocks.lease_files import FileLock, make_shared_folder, open_shared, overwrite, read_json, try_lock
from prefect_rlhf.blocks.lease_queue import FIRST, LeaseQueue, Waiter
from prefect_rlhf.errors.errors import InvalidInput, RlhfError
from prefect_rlhf.errors.in_short import clean_name
from prefect_rlhf.placement.devices.mesh import ClusterShape, Device, DeviceMesh

MOST_PID = 1 << 22  # of Linux
MOST_NAMES = 3  # in a line
BOOK_LOCK_SECONDS = 5.0  # the book is locked for some file operations; longer means that its holder is stopped


@dataclass(frozen=True, slots=True)
class Holder:
    """The holder of a device: the flow run, the pid of the run or its worker, and the start time in ISO 8601."""

    flow_run_id: str
    flow_run: str
    pid: int
    since: str

    @classmethod
    def now(cls, flow_run_id: str, flow_run: str) -> Holder:
        since = datetime.now().astimezone().isoformat(timespec="seconds")
        return cls(flow_run_id, clean_name(flow_run), os.getpid(), since)

    @classmethod
    def read(cls, values: object) -> Holder | None:
        """Return the holder in a lease file's JSON; None for values that no holder writes.

        >>> print(Holder.read({"flow_run_id": "1", "flow_run": "a", "pid": 7, "since": "2026-01-01T10:32:00"}))
        a (pid 7) since 2026-01-01 10:32
        >>> Holder.read({"flow_run_id": "1", "flow_run": "a", "pid": 7, "since": "yesterday"})
        """
        if not isinstance(values, dict):
            return None
        try:
            flow_run_id, flow_run, since = (str(values[key]) for key in ("flow_run_id", "flow_run", "since"))
            pid = int(values["pid"])
            datetime.fromisoformat(since)
        except (KeyError, TypeError, ValueError, OverflowError):
            return None
        return cls(flow_run_id, clean_name(flow_run), pid, since) if 0 < pid <= MOST_PID else None

    def __str__(self) -> str:
        since = datetime.fromisoformat(self.since)
        day = "" if since.date() == datetime.now(since.tzinfo).date() else f"{since:%Y-%m-%d} "
        return f"{self.flow_run} (pid {self.pid}) since {day}{since:%H:%M}"


@dataclass(frozen=True, slots=True)
class Busy:
    """The mesh is not free now; try again later. `holders` hold its devices, `before` are ahead in the queue."""

    wanted: str
    cluster: str
    holders: tuple[str, ...]
    before: tuple[str, ...] = ()

    def __str__(self) -> str:
        reasons = [f"held by {_some(self.holders)}"] if self.holders else []
        if self.before:
            reasons.append(f"after {_some(self.before)}, which comes first")
        why = ", ".join(reasons) or "held by another process"
        return f"waiting for {self.wanted} of cluster {self.cluster}: {why}"


@dataclass(slots=True)
class LeasedMesh:
    """A mesh with devices locked by this process. Pass `descriptors` to a child that must keep the devices."""

    id: str
    mesh: DeviceMesh
    descriptors: tuple[int, ...]

    def release(self) -> None:
        """Close this process's copies. The devices become free unless a child holds copies. Idempotent."""
        for descriptor in self.descriptors:
            os.close(descriptor)
        self.descriptors = ()


class LeaseBook:
    """The leases of one cluster on this machine, kept in `directory`.

    With `any_number`, a mesh may also be any consecutive devices of a node, for processes that are not ranks of a plan.

    >>> import tempfile
    >>> book = LeaseBook(Path(tempfile.mkdtemp()), ClusterShape("desk", 1, 2, 8 << 30))
    >>> leased = book.acquire("n0:0-1", Holder("id", "ppo/amber-fox", 1, "2026-01-01T10:32:00"))
    >>> print(book.acquire(1, Holder.now("id", "ppo/late-owl")))
    waiting for 1 device of cluster desk: held by ppo/amber-fox (pid 1) since 2026-01-01 10:32
    >>> leased.release()
    """

    def __init__(self, directory: Path, cluster: ClusterShape, any_number: bool = False) -> None:
        self.directory = directory.expanduser() / cluster.name
        self.cluster = cluster
        self.any_number = any_number
        self.queue = LeaseQueue(self.directory / "queue")

    def enter(
        self,
        wanted: str | int,
        flow_run_id: str,
        flow_run: str,
        arrived: float | None = None,
        priority: int = FIRST,
    ) -> FileLock | None:
        """Put a flow run into the queue before it requests `wanted`; it keeps its place until the lock is released.

        Returns None if another process holds the run's place. `arrived` is in seconds since 1970, by default now.
        Raises InvalidInput if the cluster can never provide `wanted`.
        """
        devices = self._reach(wanted)
        with self._book_lock():
            return self.queue.enter(flow_run_id, clean_name(flow_run), devices, arrived, priority)

    def acquire(self, wanted: str | int, holder: Holder, at_least: int = 0) -> LeasedMesh | Busy:
        """Lock every device of a mesh or no device: the named mesh, or any mesh of `wanted` devices.

        If no such mesh is free, `at_least` accepts a smaller mesh: the largest free part with at least this many
        devices. A device that an earlier flow run in the queue could use does not count as free, so no waiting run is
        delayed. Raises InvalidInput if the cluster can never provide the mesh.
        """
        candidates, *smaller = self.acceptable(wanted, at_least)
        # Only a lock proves that a device is free, so a search locks all free devices for a moment. The book's lock
        # keeps another search from counting these locks as leases. It also makes queue and devices one decision: no
        # run can join the queue between the look at earlier waiters and the lease.
        with self._book_lock():
            before = self.queue.before(holder.flow_run_id)
            unlocked = self._lock_free_devices()
            free = {device for device in unlocked if not any(waiter.could_use(device) for waiter in before)}
            chosen = (self._choose(meshes, free) for meshes in (candidates, *smaller))
            mesh = next((mesh for mesh in chosen if mesh is not None), None)
            locked = () if mesh is None else tuple(unlocked.pop(device) for device in mesh.devices())
            for descriptor in unlocked.values():
                os.close(descriptor)
            if mesh is None:
                return self._busy(wanted, candidates, before)
            for descriptor in locked:
                overwrite(descriptor, json.dumps(asdict(holder)))
        return LeasedMesh(uuid.uuid4().hex[:12], mesh, locked)

    def take_run(self, flow_run_id: str) -> FileLock | None:
        """Lock a flow run, so that only one process at a time can start it; None if another process holds it."""
        self._make_folder()
        return FileLock.take(self.directory / "runs" / f"{flow_run_id}.lock")

    def _make_folder(self) -> None:
        make_shared_folder(self.directory.parent)
        make_shared_folder(self.directory)

    def acceptable(self, wanted: str | int, at_least: int = 0) -> tuple[tuple[DeviceMesh, ...], ...]:
        """Return the meshes of the wanted size, followed for each smaller size by the meshes that `acquire` would
        accept.

        Raises InvalidInput if the cluster can never provide `wanted`.
        """
        candidates = self.candidates(wanted)
        return (candidates, *(self._smaller(candidates, at_least) if at_least else ()))

    def _reach(self, wanted: str | int) -> DeviceMesh:
        """Return the rectangle that spans all meshes which satisfy `wanted`."""
        candidates = self.candidates(wanted)
        first, last = candidates[0], candidates[-1]
        nodes = last.first_node + last.num_nodes - first.first_node
        devices = last.first_device + last.devices_per_node - first.first_device
        return DeviceMesh(first.first_node, nodes, first.first_device, devices)

    def candidates(self, wanted: str | int) -> tuple[DeviceMesh, ...]:
        """Return every mesh that satisfies `wanted`, in device order. Raises InvalidInput if no mesh does."""
        if isinstance(wanted, str):
            return (self._named(DeviceMesh.parse(wanted)),)
        if meshes := self._meshes(wanted):
            return meshes
        raise InvalidInput("num_devices", wanted, self._sizes())

    def _sizes(self) -> str:
        """Say in words how many devices a lease may have, and how many the cluster has."""
        per_node, num_nodes, name = self.cluster.devices_per_node, self.cluster.num_nodes, self.cluster.name
        if per_node == num_nodes == 1:
            return f"1: cluster {name} has a single device"
        if per_node == 1:
            return f"1 to {num_nodes}: cluster {name} has {num_nodes} nodes of a single device"
        if self.any_number:
            sizes = f"1 to {per_node}"
        else:
            parts = [1 << power for power in range((per_node - 1).bit_length())]
            sizes = f"{', '.join(map(str, parts))} or {per_node}"
        if num_nodes == 1:
            return f"{sizes}: cluster {name} has {per_node} devices"
        whole = f"a multiple of {per_node} up to {per_node * num_nodes}"
        return f"{sizes}, or {whole}: cluster {name} has {num_nodes} nodes of {per_node} devices"

    def _named(self, mesh: DeviceMesh) -> DeviceMesh:
        """Return `mesh`. Raises InvalidInput if it is not in the cluster, or is not aligned without `any_number`."""
        is_slice = mesh.num_nodes == 1 and self.cluster.whole.contains(mesh)
        return mesh if self.any_number and is_slice else self.cluster.check_mesh(mesh)

    def _meshes(self, size: int) -> tuple[DeviceMesh, ...]:
        """Return every mesh of `size` devices, in device order; without `any_number` only aligned ones."""
        per_node, num_nodes = self.cluster.devices_per_node, self.cluster.num_nodes
        if size >= per_node and size % per_node == 0 and size // per_node <= num_nodes:
            nodes = size // per_node
            return tuple(DeviceMesh(first, nodes, 0, per_node) for first in range(num_nodes - nodes + 1))
        if 0 < size < per_node and (self.any_number or size & (size - 1) == 0):
            firsts = range(0, per_node - size + 1, 1 if self.any_number else size)
            return tuple(DeviceMesh(node, 1, first, size) for node in range(num_nodes) for first in firsts)
        return ()

    def _smaller(self, wanted: tuple[DeviceMesh, ...], at_least: int) -> tuple[tuple[DeviceMesh, ...], ...]:
        """Return the parts of the wanted meshes with at least `at_least` devices, grouped by size, largest first.

        Raises InvalidInput if `at_least` exceeds the wanted size.
        """
        most = wanted[0].num_devices
        if at_least > most:
            raise InvalidInput("min_devices", at_least, f"at most {most}, the devices that the run asks for")
        by_size = (self._meshes(size) for size in range(most - 1, at_least - 1, -1))
        return tuple(
            tuple(mesh for mesh in meshes if any(whole.contains(mesh) for whole in wanted)) for meshes in by_size
        )

    def _choose(self, candidates: tuple[DeviceMesh, ...], free: Set[Device]) -> DeviceMesh | None:
        """Return the free candidate where the fewest devices are free: large blocks remain for large runs.

        With `any_number`, an aligned candidate is taken before others in a gap of the same size.
        """
        fitting = [mesh for mesh in candidates if all(device in free for device in mesh.devices())]
        if not self.any_number:
            return min(fitting, key=lambda mesh: self._free_block(mesh, free), default=None)
        width = candidates[0].devices_per_node
        step = width if width & (width - 1) == 0 else 1  # only powers of two have aligned meshes
        return min(fitting, key=lambda mesh: (self._free_gap(mesh, free), mesh.first_device % step), default=None)

    def _free_block(self, mesh: DeviceMesh, free: Set[Device]) -> int:
        """Return the number of devices in the largest wholly free aligned block of a node around `mesh`."""
        width = mesh.devices_per_node
        while width < self.cluster.devices_per_node:
            first = mesh.first_device // (2 * width) * (2 * width)
            last = min(first + 2 * width, self.cluster.devices_per_node)
            if any(Device(mesh.first_node, index) not in free for index in range(first, last)):
                break
            width *= 2
        return width

    def _free_gap(self, mesh: DeviceMesh, free: Set[Device]) -> int:
        """Return the number of consecutive free devices of a node around `mesh`."""
        node, first, last = mesh.first_node, mesh.first_device, mesh.first_device + mesh.devices_per_node
        while Device(node, first - 1) in free:
            first -= 1
        while Device(node, last) in free:
            last += 1
        return last - first

    def _lock_free_devices(self) -> dict[Device, int]:
        """Lock every free device of the cluster; the caller closes the descriptors that it does not keep."""
        locked = {}
        for device in self.cluster.whole.devices():
            descriptor = open_shared(self._path(device))
            if try_lock(descriptor):
                locked[device] = descriptor
            else:
                os.close(descriptor)
        return locked

    def _busy(self, wanted: str | int, candidates: tuple[DeviceMesh, ...], before: tuple[Waiter, ...]) -> Busy:
        words = wanted if isinstance(wanted, str) else f"{wanted} device{'s' if wanted > 1 else ''}"
        devices = {device for mesh in candidates for device in mesh.devices()}
        holders = {str(holder) for device in devices if (holder := self._holder_of(device))}
        rivals = (waiter.flow_run for waiter in before if any(waiter.devices.overlaps(mesh) for mesh in candidates))
        return Busy(words, self.cluster.name, tuple(sorted(holders)), tuple(rivals))

    def _holder_of(self, device: Device) -> Holder | None:
        """Return the holder that `device`'s file records; None if the device is free or the record is invalid."""
        descriptor = open_shared(self._path(device))
        try:
            return None if try_lock(descriptor) else Holder.read(read_json(descriptor))
        finally:
            os.close(descriptor)

    def _path(self, device: Device) -> Path:
        return self.directory / f"n{device.node}-{device.index}.lease"

    @contextmanager
    def _book_lock(self) -> Iterator[None]:
        """Let one process at a time search for free devices.

        Raises RlhfError if another process keeps the book locked for BOOK_LOCK_SECONDS.
        """
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


def _some(names: Sequence[str]) -> str:
    """Return the first names and the number of further names."""
    more = [f"{len(names) - MOST_NAMES} more"] if len(names) > MOST_NAMES else []
    return "; ".join([*names[:MOST_NAMES], *more])
