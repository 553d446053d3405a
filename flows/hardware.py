"""Which hardware a lease's costs are counted by when nobody measured it: the datasheet of its devices."""

from __future__ import annotations

import shutil
import subprocess

from prefect_rlhf.placement.cost.sources import CostSources
from prefect_rlhf.placement.devices import NETWORKS, DeviceKind, Efficiency, Hardware, device_kind
from prefect_rlhf.placement.errors import InvalidInput
from prefect_rlhf.placement.lease import Lease

QUERY = ("nvidia-smi", "--query-gpu=name", "--format=csv,noheader")
NETWORK = NETWORKS["infiniband-200"]  # between nodes, where nobody says: the slower of those that papers report

CPU = Hardware(
    DeviceKind(
        name="cpu",
        bfloat16_flops=100e9,
        float32_flops=100e9,
        memory_bytes_per_second=10e9,
        memory_bytes=0,  # a cluster says what a rank may use
        link_bytes_per_second=4e9,
        host_bytes_per_second=8e9,
        source="one core of 3 GHz with two 512-bit multiply-adds a cycle; its share of two channels of memory",
    ),
    devices_per_node=1,
    efficiency=Efficiency(graph_layer_seconds=400e-6, eager_layer_seconds=400e-6, call_seconds=0.05),
)
"""A process with a core of its own, as a rank on a machine without GPUs. It orders plans; a profile says seconds."""


def cost_sources(held: Lease) -> CostSources:
    """The datasheet of the lease's devices for every node of its cluster. Raises InvalidInput for an unknown GPU."""
    shape = held.cluster
    base = CPU if held.kind == "cpu" else Hardware(device_kind(gpu_name(), "kind"), shape.devices_per_node)
    network = NETWORK if shape.num_nodes > 1 else None
    hardware = Hardware(base.device, shape.devices_per_node, network, base.efficiency)
    return CostSources.equal_nodes(hardware, shape.num_nodes)


def gpu_name() -> str:
    """The product name of this machine's first GPU."""
    if shutil.which(QUERY[0]) is None:
        raise InvalidInput("kind", "cuda", f"a machine with {QUERY[0]}, which says what GPUs there are")
    answer = subprocess.run(QUERY, capture_output=True, text=True, check=False, timeout=60)
    names = answer.stdout.splitlines()
    if answer.returncode or not names:
        raise InvalidInput("kind", "cuda", f"a GPU; {QUERY[0]} says: {(answer.stdout + answer.stderr).strip()[:200]}")
    return names[0].strip()
