"""Room: the share of each device's memory that plans keep free for uncounted memory, unless you set a headroom."""

from dataclasses import replace

from prefect_rlhf.placement.devices.mesh import MOST_ROOM, Backend, ClusterShape
from prefect_rlhf.placement.memory.bytes import usable_bytes, with_headroom
from prefect_rlhf.placement.memory.processes import ALLOCATOR_SHARES, rank_program_bytes

CARD_ROOM = 0.04
"""Share of a GPU for memory that its allocator cannot use, contexts of other processes, and cards with less memory
than their datasheet: 3.2 of an H100's 79.1 GiB. An assumption, until a run's `memory.json` on a full card replaces it.
The readings in benchmarks/results/2026-11-27_h100: the tensors of a call took 94.8% to 99.9% of its certificate
(bytes_of_calls.jsonl), a context takes 1.67 GiB (`bytes.CONTEXT_BYTES`), and the card had 78.45 GiB for a plan."""


def with_room(cluster: ClusterShape, headroom: float | None, backend: Backend) -> ClusterShape:
    """Return the cluster with the stated headroom, or else with the usual room.

    Raises InvalidInput for a headroom that leaves no memory.
    """
    if headroom is not None:
        return replace(with_headroom(cluster, headroom, backend), room=0.0)
    least = min(map(cluster.whole_memory_bytes, range(cluster.num_nodes)))
    share = CARD_ROOM if backend == "cuda" else process_share(least, cluster.devices_per_node)
    return replace(with_headroom(cluster, 0.0, backend), room=share)


def without_room(cluster: ClusterShape) -> ClusterShape:
    """Return the cluster for a plan from a file, which may use the room."""
    return replace(cluster, room=0.0)


def process_share(device_bytes: int, devices_per_node: int) -> float:
    """Return the share of a CPU device's memory for its process without tensors: programs, and the allocators' minimum.

    The numbers come from `processes`, as in a dry run. A device too small for the programs cannot stand for a process's
    memory, so it keeps no room.

    >>> round(process_share(8 << 30, 1), 2), process_share(1 << 29, 1)
    (0.31, 0.0)
    """
    left = device_bytes - rank_program_bytes(devices_per_node)
    if left <= 0:
        return 0.0
    tensors = left / (1 + ALLOCATOR_SHARES[0])
    return min(MOST_ROOM, max(0.0, 1 - tensors / usable_bytes(device_bytes, "cpu")))
