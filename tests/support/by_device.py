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
) -> tuple[ResidentBytes, ...]:
    """Count an instance's bytes on each device, see `kept_bytes`; its calls' items go to the replicas in turn."""
    dp = instance.strategy.dp
    rows = tuple(max(len(range(d, call.num_items, dp)) * call.rows_per_item for call in calls) for d in range(dp))
    trained = any(call.kind == "train_step" for call in calls)
    spread = kept_bytes(instance, trained, model, max_length, backend, MOST_DEVICES, rows)
    return tuple(
        ResidentBytes(device, instance, what, size)
        for device, kind in zip(instance.devices, spread.kinds.tolist(), strict=True)
        for what, size in spread.values[kind]
    )
