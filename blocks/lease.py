"""Leases of devices for runs without a worker: from Python, a notebook or the command line."""

import os
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from importlib.util import find_spec
from pathlib import Path

from prefect_rlhf.blocks.lease_book import Busy, Holder, LeaseBook, LeasedMesh
from prefect_rlhf.errors.errors import InvalidInput, RlhfError
from prefect_rlhf.errors.install_command import install_command
from prefect_rlhf.placement.devices.lease import Lease
from prefect_rlhf.placement.devices.mesh import Backend, ClusterShape

DEFAULT_LEASE_DIRECTORY = Path("~/.prefect-rlhf/leases")
RETRY_SECONDS = 0.5
TERMINAL_LINE_SECONDS = 60.0  # between two lines about a wait

ONE_DEVICE = ClusterShape("local", num_nodes=1, devices_per_node=1, device_memory_bytes=64 << 30, backend="cpu")
"""The cluster of a run without a worker: a single device and no gang, which suits a debugger."""

_current: ContextVar[Lease | None] = ContextVar("rlhf_lease", default=None)  # set by `running_on`


class LeaseTimeout(RlhfError, TimeoutError):
    """Other runs still held the mesh when the maximum wait ended."""


@contextmanager
def lease(
    cluster: ClusterShape,
    mesh: str | int,
    *,
    kind: Backend | None = None,
    directory: Path = DEFAULT_LEASE_DIRECTORY,
    wait_seconds: float = 3600.0,
    flow_run: str = "a run without a worker",
    say: Callable[[str], object] = print,
) -> Iterator[Lease]:
    """Hold a mesh (a name, or a number of devices) of `cluster` while the body runs.

    `kind` defaults to the cluster's, as in a Cluster block. While others hold the mesh, `say` receives a line every
    minute that names them. Raises InvalidInput if the cluster can never provide that mesh, LeaseTimeout if the mesh is
    not free after `wait_seconds`.

    >>> import tempfile
    >>> with lease(ClusterShape("desk", 1, 2, 8 << 30), 1, directory=Path(tempfile.mkdtemp())) as leased:
    ...     print(leased.pool, leased.mesh.name)
    local n0:0
    """
    book = LeaseBook(directory, cluster)
    require_ray(cluster)
    locked = _wait_for_mesh(book, mesh, flow_run, wait_seconds, say)
    try:
        yield Lease("local", locked.id, cluster, locked.mesh, locked.mesh.devices(), kind or cluster.backend)
    finally:
        locked.release()


def require_ray(cluster: ClusterShape) -> None:
    """Raise InvalidInput if a cluster with several nodes or with `node_kinds` lacks Ray, which starts its ranks."""
    if cluster.through_ray and find_spec("ray") is None:
        seen, alone = (
            (list(cluster.node_devices), "no kinds of nodes") if cluster.node_devices else (cluster.num_nodes, "1")
        )
        field = "node_kinds" if cluster.node_devices else "num_nodes"
        raise InvalidInput(field, seen, f"{alone}, or Ray on each node: {install_command('ray')}")


def _wait_for_mesh(
    book: LeaseBook, mesh: str | int, flow_run: str, wait_seconds: float, say: Callable[[str], object]
) -> LeasedMesh:
    deadline = time.monotonic() + wait_seconds
    next_line, run_id = 0.0, uuid.uuid4().hex
    ticket = book.enter(mesh, run_id, flow_run)
    try:
        while isinstance(answer := book.acquire(mesh, Holder.now(run_id, flow_run)), Busy):
            now = time.monotonic()
            if now >= deadline:
                raise LeaseTimeout(f"{answer}; gave up after {wait_seconds:g} s")
            if now >= next_line:
                say(str(answer))
                next_line = now + TERMINAL_LINE_SECONDS
            time.sleep(min(RETRY_SECONDS, deadline - now))
    finally:
        if ticket is not None:
            ticket.release()
    return answer


def dry_lease(cluster: ClusterShape, kind: Backend = "cpu") -> Lease:
    """Return the lease of a dry run without a worker: the mesh is the whole cluster, and no device is held."""
    return Lease("local", "dry-run", cluster, cluster.whole, (), kind)


@contextmanager
def running_on(leased: Lease) -> Iterator[None]:
    """Assign `leased` to the flow run that the body starts in this process."""
    token = _current.set(leased)
    try:
        yield
    finally:
        _current.reset(token)


def given_lease() -> Lease | None:
    """Return the lease that `running_on` or a worker assigned to this flow run; None without a lease."""
    return _current.get() or Lease.from_environment(os.environ)


@contextmanager
def leased_devices(dry_run: bool = False) -> Iterator[Lease]:
    """Yield this flow run's lease. Without a lease, yield a device of this machine, or no device for a dry run."""
    leased = given_lease()
    if leased is not None:
        yield leased
    elif dry_run:
        yield dry_lease(ONE_DEVICE)
    else:
        with lease(ONE_DEVICE, 1) as leased:
            yield leased
