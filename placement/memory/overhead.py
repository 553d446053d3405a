"""CUDA memory outside of tensors: buffers of collectives, per pair or group, and captured graphs.

It stays allocated while a model is in host memory. On CPU, gloo's buffers and vLLM's eager steps are too small to
count.
"""

from collections import defaultdict
from collections.abc import Mapping
from functools import lru_cache

import numpy as np

from prefect_rlhf.placement.devices.mesh import Backend, Device
from prefect_rlhf.placement.engine_traits import TRAITS
from prefect_rlhf.placement.graph import Call, CallKind, DataflowGraph
from prefect_rlhf.placement.memory.alike import Ints, Spread, classes, device_numbers, spread_on
from prefect_rlhf.placement.memory.bytes import CONTEXT_BYTES, MIB
from prefect_rlhf.placement.memory.needs import ByteShare
from prefect_rlhf.placement.models.model import ModelSpec
from prefect_rlhf.placement.plan import (
    EngineKind,
    ExecutionPlan,
    ModelInstance,
    Placement,
    instances,
    offloaded_parts,
)

PAIR_BYTES = 544 * MIB
"""A NCCL communicator between two GPUs: 24 channels, each with buffers of 9 MiB for a ring and as many for a tree
(github.com/NVIDIA/nccl/issues/964, measured on A100s with NVLink)."""
GROUP_BYTES = 688 * MIB
"""A communicator between more GPUs, where a tree has two connections (the same)."""
GRAPH_BYTES_A_LAYER = 16 * MIB
"""vLLM's captured graphs: it logs 0.21 GiB for 16 layers and about 0.5 GiB for 32 (vllm-project/vllm#11349).
In the readings of CONTEXT_BYTES 28 layers take 9 MiB each."""
REDUCE_BUFFER_BYTES = (8 + 16 + 8 + 128) * MIB
"""A vLLM engine with tp > 1: three buffers of its custom all-reduce, and a symmetric buffer, at its largest
(`CustomAllreduce.__init__` and SYMM_MEM_ALL_REDUCE_MAX_SIZES in vllm/distributed/device_communicators, 0.32)."""
DEVICE = "device"
"""The owner of shares that no model owns."""


def overhead(graph: DataflowGraph, plan: ExecutionPlan, backend: Backend) -> Mapping[Device, tuple[ByteShare, ...]]:
    """Return the bytes that each device of a plan uses for collectives and graphs, from the first step to the last."""
    found, per_node = spread_overhead(graph, plan, backend), plan.cluster.devices_per_node
    pairs = zip(found.numbers.tolist(), found.kinds.tolist(), strict=True)
    return {Device(*divmod(number, per_node)): found.values[kind] for number, kind in pairs}


def spread_overhead(graph: DataflowGraph, plan: ExecutionPlan, backend: Backend) -> Spread[tuple[ByteShare, ...]]:
    """Return `overhead` by kind of device."""
    users = instances(graph, plan) if backend == "cuda" else {}
    of_users = (
        (instance, frozenset(call.kind for call in calls), graph.model(instance.role))
        for instance, calls in users.items()
    )
    return _overhead(tuple(of_users), plan.cluster.devices_per_node, plan.cluster.num_nodes)


@lru_cache(maxsize=256)  # many of the plans that a question compares have the same instances
def _overhead(
    users: tuple[tuple[ModelInstance, frozenset[CallKind], ModelSpec], ...], per_node: int, num_nodes: int
) -> Spread[tuple[ByteShare, ...]]:
    counts, num_bytes = (np.zeros(num_nodes * per_node, dtype=np.int64) for _ in range(2))
    opened: dict[str, set[bytes]] = defaultdict(set)  # equal groups of an engine share a communicator

    def open_groups(engine: str, groups: Ints) -> None:
        names = [group.tobytes() for group in groups]
        added = groups[[name not in opened[engine] for name in names]].ravel()
        counts[added] += 1
        num_bytes[added] += communicator_bytes(groups.shape[1])
        opened[engine].update(names)

    for instance, kinds, model in users:
        sums_embeddings = "lm" in model.head and model.shape.tied_embeddings
        for groups in _groups(instance, kinds, sums_embeddings, per_node):
            open_groups(instance.engine, groups)
    there = [spread_on((instance.mesh,), per_node, ()).column(num_nodes * per_node) for instance, _, _ in users]
    world = np.flatnonzero(np.sum(there, axis=0)) if there else np.zeros(0, dtype=np.int64)
    if len(world) > 1:  # ranks open the communicator of all of them when they start
        open_groups("world", world[None])
    first, kind = classes([*there, counts, num_bytes], num_nodes * per_node)
    values = []
    for device in first.tolist():
        shares = [
            ByteShare(instance.name, what, size, False)
            for (instance, _, model), column in zip(users, there, strict=True)
            for what, size in _of_engine(instance, model)
            if size and column[device]
        ]
        if counts[device]:
            shares.append(ByteShare(DEVICE, f"{counts[device]} NCCL communicators", int(num_bytes[device]), False))
        values.append(tuple(shares))
    return Spread(world, kind[world], tuple(values))


def _of_engine(instance: ModelInstance, model: ModelSpec) -> tuple[tuple[str, int], ...]:
    """Return the bytes of an instance's own graphs and buffers on each of its devices, by kind."""
    traits = TRAITS[instance.engine]
    buffers = REDUCE_BUFFER_BYTES if traits.has_reduce_buffers and instance.strategy.tp > 1 else 0
    return ("CUDA graphs", _graph_bytes(instance.engine, model)), ("all-reduce buffers", buffers)


def torch_limits(graph: DataflowGraph, plan: ExecutionPlan, backend: Backend) -> dict[Device, int]:
    """Return how many bytes torch may reserve on each device of a plan: all but CUDA's context and communicators.

    Torch may use the room that plans keep free, but not a stated headroom. A device with an engine that sleeps has no
    limit, because torch counts a sleeping engine's memory, which vLLM has unmapped, as its own, so a limit would refuse
    free memory. On CPU no limits apply.
    """
    if backend == "cpu":
        return {}
    asleep = {
        device
        for instance in offloaded_parts(graph, plan)
        if TRAITS[instance.engine].sleeps_on_cuda
        for device in instance.devices
    }
    groups = overhead(graph, plan, backend)
    devices = {device for instance in instances(graph, plan) for device in instance.devices} - asleep
    limits = {}
    for device in sorted(devices):
        collectives = sum(share.num_bytes for share in groups.get(device, ()) if share.owner == DEVICE)
        limits[device] = plan.cluster.stated_memory_bytes(device.node) - CONTEXT_BYTES - collectives
    return limits


def call_overhead(call: Call, placement: Placement, model: ModelSpec, backend: Backend) -> tuple[int, int]:
    """Return a lower bound on the bytes (graphs, communicators) that a call alone adds to each of its devices."""
    if backend == "cpu":
        return 0, 0
    strategy = placement.strategy
    sizes = [strategy.tp, strategy.pp]
    if strategy.ep > 1 and TRAITS[placement.engine].experts_over_tp:
        sizes.append(strategy.num_devices)
    elif strategy.ep > 1:
        sizes += [strategy.ep] if strategy.ep < strategy.dp or call.kind != "train_step" else []
        sizes += [strategy.dp // strategy.ep] if call.kind == "train_step" else []
    if call.kind == "train_step":
        sizes.append(strategy.dp)
        if strategy.num_devices not in sizes:
            sizes.append(strategy.num_devices)
    return _graph_bytes(placement.engine, model), sum(map(communicator_bytes, sizes))


def _graph_bytes(engine: EngineKind, model: ModelSpec) -> int:
    return model.shape.num_layers * GRAPH_BYTES_A_LAYER if TRAITS[engine].replays_graphs else 0


def communicator_bytes(size: int) -> int:
    """Return the bytes per device of a communicator of `size` devices.

    >>> [communicator_bytes(size) // MIB for size in (1, 2, 8)]
    [0, 544, 688]
    """
    if size <= 1:
        return 0
    return PAIR_BYTES if size == 2 else GROUP_BYTES


@lru_cache(maxsize=256)  # many of the plans that a question compares have the same
def _groups(
    instance: ModelInstance, kinds: frozenset[CallKind], sums_embeddings: bool, per_node: int
) -> tuple[Ints, ...]:
    """Return the groups of an instance that pass tensors of a GPU, as [group, member]: the numbers of devices.

    Layers reduce over tp, stages send over pp, tokens go to experts over ep. Training sums gradients over dp, their
    norm over the mesh, and a tied embedding's over both ends. Generation in Megatron sends between neighbours and tells
    its replica each token.
    """
    strategy, numbers = instance.strategy, device_numbers(instance, per_node)
    ep, dp = strategy.ep, strategy.dp
    stages = numbers.reshape(strategy.pp, dp // ep, ep, strategy.tp)  # [stage, equal experts, share of them, tp part]
    by_replica = numbers.reshape(strategy.pp, dp, strategy.tp)
    pipelines = by_replica.transpose(1, 2, 0).reshape(-1, strategy.pp)
    mesh = numbers[None]
    found = [numbers.reshape(-1, strategy.tp), pipelines]
    if ep > 1:
        of_experts = stages.transpose(0, 1, 3, 2).reshape(-1, ep)
        found.append(mesh if TRAITS[instance.engine].experts_over_tp else of_experts)
    if "train_step" in kinds:
        found += [by_replica.transpose(0, 2, 1).reshape(-1, dp), mesh]
        if ep > 1:
            found.append(stages.transpose(0, 2, 3, 1).reshape(-1, dp // ep))
    if "generate" in kinds and TRAITS[instance.engine].pipelines:
        found.append(by_replica.transpose(1, 0, 2).reshape(dp, -1))
    if "train_step" in kinds and sums_embeddings and strategy.pp > 1:
        found.append(pipelines[:, [0, -1]])
    if "generate" in kinds and TRAITS[instance.engine].pipelines:
        found += [pipelines[:, stage : stage + 2] for stage in range(strategy.pp - 1)]
    return tuple(np.ascontiguousarray(groups) for groups in found if groups.shape[1] > 1)
