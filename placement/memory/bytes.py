"""Bytes of a device: how many a plan may fill, and how they are written for people."""

from __future__ import annotations

from math import ceil

from prefect_rlhf.placement.cost.hardware import GIB

MIB = 1 << 20
RESERVED_SHARE = 0.08  # of a device: contexts and buffers of CUDA and collectives, fragments that nothing fits in


def usable_bytes(device_bytes: int) -> int:
    """Return how much of a device's memory a plan may fill."""
    return int(device_bytes * (1 - RESERVED_SHARE))


def enough_bytes(filled_bytes: int) -> int:
    """Return the memory, in whole GiB, of which a plan may fill so much.

    >>> enough_bytes(73 * GIB) // GIB, enough_bytes(74 * GIB) // GIB
    (80, 81)
    """
    return ceil((filled_bytes + 1) / (1 - RESERVED_SHARE) / GIB) * GIB


def byte_size(num_bytes: int) -> str:
    """Write bytes in the unit that people would choose.

    >>> byte_size(3 << 29), byte_size(5 << 20)
    ('1.50 GiB', '5.00 MiB')
    """
    return f"{num_bytes / GIB:.2f} GiB" if num_bytes >= GIB else f"{num_bytes / MIB:.2f} MiB"
