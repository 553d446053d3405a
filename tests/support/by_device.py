"""Bytes of an instance, which certificates count by kind of device, device by device."""

from prefect_rlhf.placement.devices.mesh import MOST_DEVICES, Backend
from prefect_rlhf.placement.graph import Call
from prefect_rlhf.placement.memory.holdings import ResidentBytes, kept_bytes
from prefect_rlhf.placement.models.model import ModelSpec
from prefect_rlhf.placement.plan import ModelInstance


def instance_holdings(
    instance: ModelInstance,
    calls: tuple[Call, ...],
    model: ModelSpec,
    max_length: int,
    backend: Backend,
    node_speeds: tuple[float, ...] = (),
    cache_bytes: int | None = None,
) -> tuple[ResidentBytes, ...]:
    """Count all bytes of an instance, device by device; see `kept_bytes`."""
    spread = kept_bytes(instance, calls, model, max_length, backend, MOST_DEVICES, node_speeds, cache_bytes)
    return tuple(
        ResidentBytes(device, instance, what, size)
        for device, kind in zip(instance.devices, spread.kinds.tolist(), strict=True)
        for what, size in spread.values[kind]
    )
