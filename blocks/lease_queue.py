"""A lease book's queue: waiting runs and the devices that they could use, by priority and order of arrival.

A waiter holds a ticket, a file that it keeps locked: a dead waiter loses its place. The queue is read and written while
the book is locked. Any user may have written any file here, so reads of folders and files have limits.
"""

import contextlib
import fcntl
import json
import math
import os
import stat
import time
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Self

from prefect_rlhf.blocks.lease_files import FileLock, make_shared_folder, overwrite, read_json
from prefect_rlhf.errors.in_short import clean_name
from prefect_rlhf.placement.devices.mesh import Device, DeviceMesh

MOST_TICKETS = 1000
SILENT_SECONDS = 60.0  # a waiter without a request for this long is skipped: it is stopped, or its server is away
SUFFIX = ".ticket"
FIRST = 1
"""The priority of a work pool's default queue, and of a run without a worker."""


@dataclass(frozen=True, slots=True, order=True)
class Waiter:
    """A run that has waited since `arrived` (seconds since 1970) for some of `devices`; `number` breaks ties.

    `priority` is its Prefect work queue's: a smaller number goes first.
    """

    priority: int
    arrived: float
    number: int
    flow_run_id: str
    flow_run: str
    devices: DeviceMesh

    def could_use(self, device: Device) -> bool:
        """Whether a mesh that this run waits for may contain the device."""
        return self.devices.contains(DeviceMesh(device.node, 1, device.index, 1))

    def to_json(self) -> str:
        """Return the content of a ticket."""
        values = {"priority": self.priority, "arrived": self.arrived, "number": self.number}
        return json.dumps(values | {"flow_run": self.flow_run, "devices": self.devices.name})

    @classmethod
    def read(cls, flow_run_id: str, values: object) -> Self | None:
        """Return the waiter of a ticket's JSON; None for values that `to_json` does not write."""
        if not isinstance(values, dict):
            return None
        try:
            priority, arrived, number = int(values["priority"]), float(values["arrived"]), int(values["number"])
            devices = DeviceMesh.parse(str(values["devices"]))
            name = clean_name(str(values["flow_run"]))
        except (KeyError, TypeError, ValueError, OverflowError):
            return None
        return cls(priority, arrived, number, flow_run_id, name, devices) if math.isfinite(arrived) else None


class LeaseQueue:
    """The tickets in a folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def enter(
        self, flow_run_id: str, flow_run: str, devices: DeviceMesh, arrived: float | None, priority: int = FIRST
    ) -> FileLock | None:
        """Give a run its place, valid while the ticket is locked; None if another process holds the ticket.

        `arrived` defaults to now.
        """
        ticket = FileLock.take(self._path(flow_run_id))
        if ticket is not None:
            number = 1 + max((waiter.number for waiter in self.waiting()), default=0)
            since = time.time() if arrived is None else arrived
            waiter = Waiter(priority, since, number, flow_run_id, flow_run, devices)
            overwrite(ticket.descriptor, waiter.to_json())
        return ticket

    def leave(self, flow_run_id: str) -> None:
        """Remove a run's place, even if another process holds it, because the run has its devices."""
        with contextlib.suppress(OSError):
            self._path(flow_run_id).unlink()

    def before(self, flow_run_id: str) -> tuple[Waiter, ...]:
        """Record a run's request now, and return the waiters ahead of it, or all waiters if it has no place."""
        with contextlib.suppress(OSError):
            os.utime(self._path(flow_run_id), follow_symlinks=False)
        waiting = self.waiting()
        own = next((waiter for waiter in waiting if waiter.flow_run_id == flow_run_id), None)
        return tuple(waiter for waiter in waiting if own is None or waiter < own)

    def waiting(self) -> tuple[Waiter, ...]:
        """Return the waiters in order; tickets of dead waiters are removed if this user may remove them."""
        make_shared_folder(self.folder)
        with os.scandir(self.folder) as files:
            names = [file.name for file in islice(files, MOST_TICKETS) if file.name.endswith(SUFFIX)]
        return tuple(sorted(waiter for name in names for waiter in self._living(self.folder / name)))

    def _living(self, path: Path) -> Iterator[Waiter]:
        """Yield the waiter of a ticket if it is alive and has requested devices recently."""
        try:
            descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)  # a FIFO would block
        except OSError:
            return
        try:
            status = os.fstat(descriptor)
            if not stat.S_ISREG(status.st_mode):
                return
            if not _is_locked(descriptor):
                with contextlib.suppress(OSError):
                    path.unlink()
                return
            waiter = Waiter.read(path.name.removesuffix(SUFFIX), read_json(descriptor))
            if waiter is not None and time.time() - status.st_mtime < SILENT_SECONDS:
                yield waiter
        finally:
            os.close(descriptor)

    def _path(self, flow_run_id: str) -> Path:
        return self.folder / f"{flow_run_id}{SUFFIX}"


def _is_locked(descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except OSError:
        return True
    return False
