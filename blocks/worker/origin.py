"""The origin of a claimed run: its worker's machine, boot and PID namespace, and the run's lock file.

A host name is not enough: containers, clones and machines named `localhost` share it. A worker may end a run whose lock
is free only if it sees the same file that the run's processes have locked (`why_uncertain`).
"""

import os
import socket
import uuid
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Self

from prefect_rlhf.blocks.lease_files import MOST_BYTES, FileLock, overwrite

LABEL = "prefect-rlhf."
MACHINE_ID = Path("/etc/machine-id")
BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
PID_NAMESPACE = Path("/proc/self/ns/pid")
MOUNTS = Path("/proc/self/mountinfo")
LOCAL_FILE_SYSTEMS = {"bcachefs", "btrfs", "ext2", "ext3", "ext4", "f2fs", "overlay", "xfs", "zfs"}


@dataclass(frozen=True, slots=True)
class Origin:
    """Where a run was claimed. An empty field is unknown."""

    host: str = ""
    machine: str = ""
    """Stays the same after a reboot, but cloned images share it."""
    boot: str = ""
    """The random id of the running kernel, which all its containers share."""
    processes: str = ""
    """The PID namespace; a pid has no meaning outside it."""
    lock: str = ""
    """The device and inode of the run's lock file; they can be compared within one boot only."""
    attempt: str = ""
    """A random word. The worker writes it to that file, and to the message of the Pending state."""

    @classmethod
    def leave(cls, lock: FileLock) -> Self:
        """Return the origin of a run that this process claims, and write its attempt into the lock file on disk."""
        attempt = uuid.uuid4().hex
        overwrite(lock.descriptor, attempt)
        os.fsync(lock.descriptor)
        return replace(cls.here(lock), attempt=attempt)

    @classmethod
    def here(cls, lock: FileLock) -> Self:
        """Return the origin for a run whose lock this process holds; the attempt is read from the lock file."""
        status = os.fstat(lock.descriptor)
        inode = f"{status.st_dev}:{status.st_ino}"
        attempt = os.pread(lock.descriptor, MOST_BYTES, 0).decode(errors="replace")
        return cls(socket.gethostname(), _text(MACHINE_ID), _text(BOOT_ID), _pid_namespace(), inode, attempt)

    @classmethod
    def of(cls, labels: Mapping[str, Any]) -> Self:
        """Return the origin recorded in a flow run's labels; a missing label gives an empty text."""
        return cls(**{field: str(labels.get(LABEL + field, "")) for field in cls.__dataclass_fields__})

    def labels(self) -> dict[str, str]:
        """Return the labels that record this origin."""
        return {LABEL + field: value for field, value in asdict(self).items()}


def why_uncertain(taken: Origin, lock: FileLock) -> str:
    """Return why a run claimed at `taken` may still be alive although its `lock` was free; empty if it cannot be.

    Within the boot that took the run, a free lock with the same inode proves that no process of any container holds it:
    the keeper and the run's own process hold it until they end. After another boot of the same machine no process is
    left; the attempt in the file proves that the disk is not a clone's.
    """
    here, folder = Origin.here(lock), lock.path.parent.parent
    if not (taken.boot and here.boot and taken.attempt):
        return "a label of its origin is missing, or its system has no boot id"
    if taken.attempt != here.attempt or (taken.boot == here.boot and taken.lock != here.lock):
        view = "" if taken.processes == here.processes else " and another PID namespace"
        return f"its worker had another lease folder than {folder}{view}"
    if taken.boot == here.boot:
        return ""
    if not taken.machine or taken.machine != here.machine:
        return "its worker ran in another boot, and its machine id is not this machine's"
    return "" if _is_local(lock.path) else f"its worker ran in another boot, and machines may share {folder}"


def _text(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:  # a system without the file
        return ""


def _pid_namespace() -> str:
    try:
        return str(PID_NAMESPACE.readlink())
    except OSError:
        return ""


def _is_local(path: Path) -> bool:
    """Return whether only one kernel at a time can mount the kind of file system that holds `path`."""
    kind, longest = "", -1
    for line in _text(MOUNTS).splitlines():
        mount, _, source = line.partition(" - ")
        point = mount.split()[4].encode().decode("unicode_escape")  # a space is \\040 there
        if path.resolve().is_relative_to(point) and len(point) >= longest:  # a later mount hides an earlier one
            kind, longest = source.split()[0], len(point)
    return kind in LOCAL_FILE_SYSTEMS
