"""A device's resources, and which of them each kind of work uses."""

from __future__ import annotations

from typing import Literal, assert_never, get_args

from prefect_rlhf.placement.augmented.work import (
    Checkpoint,
    Commit,
    Compute,
    Export,
    Follow,
    HostCopy,
    ModelCall,
    Reallocate,
    Transfer,
    Work,
)

Resource = Literal["compute", "host_link", "disk", "hosts"]
"""Something that a node uses exclusively on a device: its compute, the link to host memory, the path to disk (with the
staged copy of its training state), or its rank's worker processes on the node's CPUs."""
RESOURCES: tuple[Resource, ...] = get_args(Resource)


def resources_of(work: Work) -> tuple[Resource, ...]:
    """Return the resources that a work uses on each of its devices; a rank runs it in the first resource's thread."""
    match work:
        case ModelCall() | Transfer() | Reallocate() | Follow() | Export():
            return ("compute",)
        case Compute(call):
            return ("hosts",) if call.on_hosts else ("compute",)
        case HostCopy():
            return ("compute", "host_link") if work.stops_devices else ("host_link",)
        case Checkpoint():  # the host memory of its copy belongs to the path to disk
            return ("compute", "disk")
        case Commit():
            return ("disk",)
        case _:
            assert_never(work)
