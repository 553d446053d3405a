"""Device memory: how much of it a plan may use, and how people read it."""

from collections.abc import Mapping
from dataclasses import replace
from math import ceil
from types import MappingProxyType

from prefect_rlhf.errors.errors import InvalidInput
from prefect_rlhf.placement.cost.datasheets.hardware import GIB
from prefect_rlhf.placement.devices.mesh import Backend, ClusterShape

MIB = 1 << 20
CONTEXT_BYTES = 1690 * MIB
"""Of each process on a GPU: CUDA's context, loaded kernels, and a communicator of one rank. A reading, from the task
runs in benchmarks/results/2026-11-27_h100 (driver 580.159.04, torch 2.13): the driver counts 1.669 GiB beyond torch's
reserved bytes for GRPO of 2 layers, 1.672 for PPO of 2 layers, 1.899 for GRPO of 28 layers with vLLM's graphs."""
WORKSPACE_BYTES = 2 * 32 * MIB
"""Of each process on a GPU: cuBLAS' workspaces, which torch allocates itself, one for each handle and stream. One has
32 MiB on Hopper and Blackwell, 8.1 MiB on older GPUs (`parseChosenWorkspaceSize` and `getNewWorkspace` in
aten/src/ATen/cuda/CublasHandlePool.cpp); `CUBLAS_WORKSPACE_CONFIG` replaces it. A thread has a handle of its own: that
of the calls, and that of autograd's backward pass. An assumption by reading; cublasLt's own are not counted."""
FRAGMENT_SHARE: Mapping[Backend, float] = MappingProxyType({"cuda": 0.03, "cpu": 0.08})
"""Of a device: gaps between tensors that come and go; on CPU the process itself, too.

On CUDA torch's unused blocks do not count: at its limit (`overhead.torch_limits`) the allocator returns them to the
driver and tries again (`malloc` in c10/cuda/CUDACachingAllocator.cpp). Gaps in used blocks remain. The 3% are an
assumption; a run's `memory.json` measures it as reserved over allocated bytes."""


def base_bytes(device_bytes: int, backend: Backend) -> Mapping[str, int]:
    """Return the bytes that a device uses under any plan, by kind."""
    fragments = int(device_bytes * FRAGMENT_SHARE[backend])
    if backend == "cpu":
        return {"fragments": fragments}
    return {"CUDA context": CONTEXT_BYTES, "cuBLAS": WORKSPACE_BYTES, "fragments": fragments}


def usable_bytes(device_bytes: int, backend: Backend) -> int:
    """Return how much of a device's memory a plan may use.

    >>> usable_bytes(100 * GIB, "cuda") // GIB
    95
    """
    return device_bytes - sum(base_bytes(device_bytes, backend).values())


def with_headroom(cluster: ClusterShape, share: float, backend: Backend) -> ClusterShape:
    """Return the cluster with this share of each device kept free. Raises InvalidInput if no memory is left."""
    least = min(map(cluster.whole_memory_bytes, range(cluster.num_nodes)))
    if usable_bytes(int(least * (1 - share)), backend) <= 0:
        context = sum(base_bytes(0, backend).values())
        most = 1 - context / (1 - FRAGMENT_SHARE[backend]) / least
        rest = "CUDA's context" if context else "the process"
        raise InvalidInput("headroom", share, f"less than {most:.3f}: {rest} needs device memory too")
    return replace(cluster, headroom=share)


def enough_bytes(filled_bytes: int, backend: Backend) -> int:
    """Return the device memory, in whole GiB, that lets a plan use `filled_bytes`.

    >>> enough_bytes(73 * GIB, "cpu") // GIB, enough_bytes(74 * GIB, "cpu") // GIB
    (80, 81)
    """
    context = sum(base_bytes(0, backend).values())
    return ceil((filled_bytes + context + 1) / (1 - FRAGMENT_SHARE[backend]) / GIB) * GIB


def byte_size(num_bytes: int) -> str:
    """Format bytes in the unit that people would choose.

    >>> byte_size(3 << 29), byte_size(5 << 20)
    ('1.50 GiB', '5.00 MiB')
    """
    return f"{num_bytes / GIB:.2f} GiB" if num_bytes >= GIB else f"{num_bytes / MIB:.2f} MiB"
