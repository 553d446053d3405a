"""Which devices a flow holds: what its worker leased, or one device of this machine."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from prefect_rlhf.blocks.lease import lease
from prefect_rlhf.placement.lease import Lease
from prefect_rlhf.placement.mesh import ClusterShape

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
