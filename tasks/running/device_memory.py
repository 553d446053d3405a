"""A check that the GPUs of a gang have the memory that the cluster declares; the certificate assumes it."""

from __future__ import annotations

import math

from prefect_rlhf.engines.gang.protocol import Gang
from prefect_rlhf.engines.rank.rank import Rank
from prefect_rlhf.errors.errors import InvalidInput
from prefect_rlhf.placement.cost.datasheets.hardware import GIB
from prefect_rlhf.placement.devices.lease import Lease


def check_device_memory(lease: Lease, gang: Gang[Rank], deadline_seconds: float) -> None:
    """Raise InvalidInput for a GPU with less memory than its cluster declares, in whole GiB, as in product names.

    Without GPUs, the cluster itself defines the memory of a rank, so there is no value to compare.
    """
    if lease.kind == "cpu":
        return
    ranks: dict[int, tuple[()]] = dict.fromkeys(range(gang.size), ())
    has = gang.call(Rank.device_memory_bytes, ranks, doing="report device memory", deadline_seconds=deadline_seconds)
    for rank, device in enumerate(lease.devices):
        said = lease.cluster.memory_bytes(device.node)
        if math.ceil(has[rank] / GIB) < said // GIB:
            right = f"at most the {has[rank] / GIB:.1f} GiB that {device} has"
            raise InvalidInput("device_memory_gib", f"{said / GIB:g}", right)
