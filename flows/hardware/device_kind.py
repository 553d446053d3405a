"""The choice between GPUs and processor cores: as the user says, else GPUs if builds and a visible GPU allow."""

from __future__ import annotations

import os
from dataclasses import replace

from prefect_rlhf.blocks.cluster import Cluster
from prefect_rlhf.blocks.lease import ONE_DEVICE, dry_lease
from prefect_rlhf.errors.errors import InvalidInput
from prefect_rlhf.flows.hardware.gpus import check_gpus, gpu_cluster, visible_gpus
from prefect_rlhf.flows.hardware.installed_engines import check_kind, other_build
from prefect_rlhf.placement.devices.lease import Lease
from prefect_rlhf.placement.devices.mesh import Backend, ClusterShape


def local_cluster(devices: int | None = None, kind: Backend | None = None) -> ClusterShape:
    """Return a cluster of this machine's devices, a single device by default; its `backend` is their kind.

    Without `kind`, the devices are GPUs if the installed engines are built for them and this process sees a GPU.
    Raises InvalidInput for more devices than there are, and for a kind that this process cannot use.
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


def unheld_devices(devices: int | None = None, kind: Backend | None = None) -> Lease:
    """Return the lease of a dry run on `local_cluster`: no device is held. Raises the same errors."""
    cluster = local_cluster(devices, kind)
    return dry_lease(cluster, cluster.backend)


def chosen_kind(wanted: Backend | None) -> Backend:
    """Return `wanted`, or the kind of a run that states no kind: GPUs if this process can use them."""
    return wanted or ("cpu" if why_no_gpu() else "cuda")


def why_no_gpu() -> str | None:
    """Return the reason why this process can use no GPU; None if it can.

    >>> why_no_gpu() is None or len(why_no_gpu().splitlines()) == 1
    True
    """
    if found := other_build("cuda"):
        return f"{found} is a build for CPU"
    try:
        return None if visible_gpus() else "CUDA_VISIBLE_DEVICES names no GPU"
    except InvalidInput as error:
        return f"no GPU is visible ({error})"


def check_leased_gpus(leased: Lease) -> None:
    """Raise InvalidInput if GPUs of this machine are leased that a gang cannot use. Ray's nodes are not checked."""
    if leased.kind == "cuda" and leased.devices and not leased.cluster.through_ray:
        check_gpus(visible_gpus(), [device.index for device in leased.devices], "mesh")


def device_line(leased: Lease) -> str:
    """Return the first line of a run's log: its devices, and why they are no GPUs."""
    number = leased.mesh.num_devices
    if leased.kind == "cpu":
        reason = why_no_gpu() or "kind: cpu is set, though this machine has GPUs"
        return f"devices: {number} processor core{'s' if number > 1 else ''} (kind: cpu); {reason}"
    if leased.cluster.through_ray or not leased.devices:
        return f"devices: {number} GPU{'s' if number > 1 else ''} (kind: cuda)"
    return f"devices: {number} x {visible_gpus()[leased.devices[0].index].name} (kind: cuda)"
