"""Chooses between GPUs and CPU cores: what the user says, else GPUs if one is visible and the builds are for GPUs."""

from __future__ import annotations

import os
from dataclasses import replace

from prefect_rlhf.blocks.cluster import Cluster
from prefect_rlhf.blocks.lease import ONE_DEVICE, dry_lease
from prefect_rlhf.errors.errors import InvalidInput
from prefect_rlhf.files.engine_builds import check_kind, chosen_kind, why_no_gpu
from prefect_rlhf.files.gpus import check_gpus, visible_gpus
from prefect_rlhf.files.host import usable_gpus
from prefect_rlhf.placement.devices.lease import Lease
from prefect_rlhf.placement.devices.mesh import Backend, ClusterShape
from prefect_rlhf.placement.memory.bytes import byte_size


def local_cluster(devices: int | None = None, kind: Backend | None = None) -> ClusterShape:
    """Return a cluster of this machine's devices, a single device by default; its `backend` is their kind.

    Without `kind`, the devices are GPUs if the installed engines are built for them and this process sees a GPU. Raises
    InvalidInput for more devices than the machine has, and for a kind that this process cannot use.
    """
    if kind is not None:
        check_kind(kind)
    if chosen_kind(kind) == "cuda":
        return gpu_cluster(devices or 1)
    cores = len(os.sched_getaffinity(0))
    if devices is not None and devices > cores:
        expected = f"at most {cores}, the cores of this machine; prefect-rlhf plan answers for other machines"
        raise InvalidInput("devices", devices, expected)
    return replace(Cluster(devices_per_node=devices).shape, backend="cpu") if devices else ONE_DEVICE


def gpu_cluster(number: int, field: str = "devices") -> ClusterShape:
    """Return a cluster of the first GPUs that this process sees. Raises InvalidInput if a gang cannot use them."""
    seen = visible_gpus()
    check_gpus(seen, range(number), field)
    memory = min(gpu.plan_bytes for gpu in seen[:number])
    return ClusterShape("local-gpus", 1, number, memory, backend="cuda")


def all_gpus() -> ClusterShape:
    """Return a cluster of all GPUs that this process sees, at least a single GPU. Raises as `gpu_cluster`."""
    return gpu_cluster(max(1, len(visible_gpus())))


def unheld_devices(devices: int | None = None, kind: Backend | None = None) -> Lease:
    """Return the lease of a dry run on `local_cluster`, which holds no device. Raises the same errors."""
    cluster = local_cluster(devices, kind)
    return dry_lease(cluster, cluster.backend)


def check_leased_gpus(leased: Lease) -> None:
    """Raise InvalidInput if ranks cannot start on the leased GPUs of this machine. A gang on Ray checks its nodes."""
    if leased.kind == "cuda" and leased.devices and not leased.cluster.through_ray:
        usable_gpus(leased.gpus, "mesh")


def device_line(leased: Lease) -> str:
    """Return the first line of a run's log: its devices and, if they are not GPUs, why."""
    number = leased.mesh.num_devices
    if leased.kind == "cpu":
        reason = why_no_gpu() or "kind: cpu is set, though this machine has GPUs"
        return f"devices: {number} processor core{'s' if number > 1 else ''} (kind: cpu); {reason}"
    if leased.cluster.through_ray or not leased.devices:
        return f"devices: {number} GPU{'s' if number > 1 else ''} (kind: cuda)"
    gpu = visible_gpus()[leased.gpus[0]]
    cluster, node = leased.cluster, leased.devices[0].node
    counted = byte_size(cluster.whole_memory_bytes(node))
    memory = (
        f"plans count with {counted} of each; the driver lists {byte_size(gpu.memory_bytes)}, and CUDA keeps a part"
    )
    return f"devices: {number} x {gpu.name} (kind: cuda); {memory}"
