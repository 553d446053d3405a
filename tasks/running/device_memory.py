"""The memory that a gang's GPUs have, held against what its cluster says: a certificate is true of no less."""

from __future__ import annotations

import math

from prefect_rlhf.engines.gang.protocol import Gang
from prefect_rlhf.placement.cost.hardware import GIB
from prefect_rlhf.placement.errors import InvalidInput
from prefect_rlhf.placement.lease import Lease


def check_device_memory(lease: Lease, gang: Gang, deadline_seconds: float) -> None:
    """Raise InvalidInput for a GPU that has less than its cluster says, in whole GiB, as products are named.

    Without GPUs the cluster says what a rank may use, and nobody else knows.
    """
    if lease.kind == "cpu":
        return
    ranks: dict[int, tuple[()]] = dict.fromkeys(range(gang.size), ())
    has = gang.call("device_memory_bytes", ranks, doing="ask for memory", deadline_seconds=deadline_seconds)
    for rank, device in enumerate(lease.devices):
        said = lease.cluster.memory_bytes(device.node)
        if math.ceil(has[rank] / GIB) < said // GIB:
            right = f"at most the {has[rank] / GIB:.1f} GiB that {device} has"
            raise InvalidInput("device_memory_gib", f"{said / GIB:g}", right)
