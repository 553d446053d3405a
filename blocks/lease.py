"""Leasing devices for a run that no worker started: in Python, in a notebook, from the command line."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from prefect_rlhf.blocks.lease_book import Busy, HeldMesh, Holder, LeaseBook
from prefect_rlhf.placement.errors import RlhfError
from prefect_rlhf.placement.lease import Backend, Lease
from prefect_rlhf.placement.mesh import ClusterShape

DEFAULT_LEASE_DIRECTORY = Path("~/.prefect-rlhf/leases")
RETRY_SECONDS = 0.5
SAY_SECONDS = 5.0


class LeaseTimeout(RlhfError, TimeoutError):
    """The mesh was still held by others when the longest wait was over."""


@contextmanager
def lease(
    cluster: ClusterShape,
    mesh: str | int,
    *,
    kind: Backend = "cpu",
    directory: Path = DEFAULT_LEASE_DIRECTORY,
    wait_seconds: float = 3600.0,
    flow_run: str = "a run without a worker",
    say: Callable[[str], object] = print,
) -> Iterator[Lease]:
    """Hold a mesh (a name, or a number of devices) of `cluster` while the body runs.

    While others hold it, tells `say` every few seconds what it waits for. Raises InvalidInput when the cluster can
    never give that mesh, LeaseTimeout when it is not free after `wait_seconds`.

    >>> import tempfile
    >>> with lease(ClusterShape("desk", 1, 2, 8 << 30), 1, directory=Path(tempfile.mkdtemp())) as held:
    ...     print(held.pool, held.mesh.name)
    local n0:0
    """
    held = _wait(LeaseBook(directory, cluster), mesh, Holder.now(f"pid-{os.getpid()}", flow_run), wait_seconds, say)
    try:
        yield Lease("local", held.id, cluster, held.mesh, held.mesh.devices(), kind)
    finally:
        held.release()


def _wait(
    book: LeaseBook, mesh: str | int, holder: Holder, wait_seconds: float, say: Callable[[str], object]
) -> HeldMesh:
    deadline = time.monotonic() + wait_seconds
    next_words = 0.0
    while isinstance(answer := book.acquire(mesh, holder), Busy):
        now = time.monotonic()
        if now >= deadline:
            raise LeaseTimeout(f"{answer}; gave up after {wait_seconds:g} s")
        if now >= next_words:
            say(str(answer))
            next_words = now + SAY_SECONDS
        time.sleep(min(RETRY_SECONDS, deadline - now))
    return answer


ONE_DEVICE = ClusterShape("local", num_nodes=1, devices_per_node=1, device_memory_bytes=64 << 30)
"""What a run without a worker gets: one device and no gang, as a debugger wants it."""


@contextmanager
def held_devices(dry_run: bool = False) -> Iterator[Lease]:
    """The devices that the worker leased for this run; without a worker, one of this machine, or for a dry run none."""
    given = Lease.from_environment()
    if given is not None:
        yield given
    elif dry_run:
        yield Lease("local", "dry-run", ONE_DEVICE, ONE_DEVICE.whole, ())
    else:
        with lease(ONE_DEVICE, 1) as held:
            yield held
