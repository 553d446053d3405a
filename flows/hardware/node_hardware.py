"""The hardware behind our own runs: datasheets with our runtime's constants, and the nodes of a lease."""

import os
from collections.abc import Iterable
from dataclasses import replace

from prefect_rlhf.files.gpus import listed_gpus
from prefect_rlhf.placement.cost.datasheets.hardware import NETWORKS, Datasheet, Efficiency, Hardware, Network
from prefect_rlhf.placement.cost.datasheets.kinds import datasheet
from prefect_rlhf.placement.cost.sources import CostSources
from prefect_rlhf.placement.cost.speeds import KnownSpeeds
from prefect_rlhf.placement.cost.times.profile import Profile
from prefect_rlhf.placement.devices.lease import Lease

NETWORK = NETWORKS["infiniband-200"]  # default between nodes: the slower of the networks in papers

CALL_SECONDS = 0.01
"""Fixed overhead of a call on its ranks, in place of the 2.2 s of ReaL's runtime. On an H100 the sample of the weights
before a call, some 1,500 short kernels, took all of it (docs/internals/cost_model.md)."""
VLLM_LAYER_SECONDS = 40e-6
"""The part of a layer's decoding step in vLLM that does not depend on its size, in place of the 190 us of ReaL's engine
of 2024. It is what public figures of a single stream leave of a step after the bytes that it reads
(docs/internals/cost_model.md). `vllm_layer_seconds` of a probe, or a profile, replaces it."""
RUNTIME = Efficiency(
    matmul=0.77,
    memory=0.845,
    passes=105.0,
    graph_layer_seconds=VLLM_LAYER_SECONDS,
    eager_layer_seconds=1.02e-3,
    call_seconds=CALL_SECONDS,
    gradient_pass_bytes=12.0,
    makes_logits_again=True,
    host_step_seconds=1.4e-3,
    host_row_seconds=42e-6,
    taken_layer_seconds=4e-3,
    attention=1.0,
    attention_half=700.0,
)
"""The constants between a datasheet's peaks and calls of our own runs on GPUs, by the readings of an H100 on 2026-11-27
(benchmarks/results/2026-11-27_h100): single kernels, training and inference of 1.3B and 1.5B, attention of 640 tokens,
decoding of 8 and 256 rows, and a move of weights into vLLM. The constants of links were not measured."""

CPU = Hardware(
    Datasheet(
        name="cpu",
        bfloat16_flops=100e9,
        float32_flops=100e9,
        memory_bytes_per_second=10e9,
        memory_bytes=0,  # a cluster states the memory of a rank
        link_bytes_per_second=4e9,
        host_bytes_per_second=8e9,
        source="a core of 3 GHz with two 512-bit multiply-adds per cycle; its share of two memory channels",
        is_host=True,
        elementwise_share=0.2,
    ),
    devices_per_node=1,
    efficiency=Efficiency(
        graph_layer_seconds=400e-6,
        eager_layer_seconds=400e-6,
        call_seconds=CALL_SECONDS,
        gradient_pass_bytes=12.0,
        makes_logits_again=True,
    ),
)
"""A process with its own core, as a rank on a machine without GPUs. It only ranks plans; a profile gives seconds."""

ORCHESTRATION_SECONDS = 0.015
"""Seconds that the controller adds to every task run, on any devices (docs/internals/cost_model.md)."""
CORE_SECONDS = 0.04
"""Processor time of controller and server per task run, which ranks lose if every core has a rank."""


def cost_sources(
    leased: Lease, device: str, profiles: Iterable[Profile] = (), probed: KnownSpeeds | None = None
) -> CostSources:
    """Return the cost sources of each node of the lease's cluster.

    `device`, `cpu` or the name of a datasheet, applies to all nodes if the cluster names no devices. Nodes without GPUs
    differ only in their speeds. The speeds of a probe apply to all nodes.
    """
    cluster = leased.cluster
    network = NETWORK if cluster.num_nodes > 1 else None
    speeds = cluster.node_speeds or (1.0,) * cluster.num_nodes
    if leased.kind == "cpu":
        nodes = [_slowed(node_hardware("cpu", cluster.devices_per_node, network), speed) for speed in speeds]
    else:
        names = cluster.node_devices or (device,) * cluster.num_nodes
        nodes = [node_hardware(name, cluster.devices_per_node, network) for name in names]
    if probed is not None:
        nodes = [probed.on(node) for node in nodes]
    return CostSources(tuple(nodes), tuple(profiles), orchestration_seconds(leased))


def _slowed(node: Hardware, speed: float) -> Hardware:
    """Return a node whose devices compute and read their memory at a fraction of the speed."""
    if speed == 1.0:
        return node
    sheet = node.device
    slower = replace(
        sheet,
        name=f"{sheet.name} x {speed:g}",
        bfloat16_flops=sheet.bfloat16_flops * speed,
        float32_flops=sheet.float32_flops * speed,
        memory_bytes_per_second=sheet.memory_bytes_per_second * speed,
    )
    return replace(node, device=slower)


def node_hardware(device: str | Datasheet, devices_per_node: int, network: Network | None) -> Hardware:
    """Return a node with the constants of our runtime; its `device` is `cpu`, a datasheet, or a datasheet's name."""
    if device == "cpu":
        return replace(CPU, devices_per_node=devices_per_node, network=network)
    sheet = datasheet(device) if isinstance(device, str) else device
    return Hardware(sheet, devices_per_node, network, RUNTIME)


def orchestration_seconds(leased: Lease) -> float:
    """Return the seconds that each task run costs a lease's ranks."""
    has_a_core_free = leased.kind != "cpu" or leased.mesh.num_devices < (os.cpu_count() or 1)
    return ORCHESTRATION_SECONDS if has_a_core_free else CORE_SECONDS


def gpu_name(field: str = "kind", otherwise: str = "node_kinds that do") -> str:
    """Return the product name of this machine's first GPU, visible or not. Raises the errors of `listed_gpus`."""
    return listed_gpus(field, otherwise)[0].name
