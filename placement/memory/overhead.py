"""The memory of CUDA devices that no tensor uses: buffers of collectives, a pair or a group at a time, and captured
graphs.

It stays allocated while a model is in host memory. On CPU, gloo's buffers and vLLM's eager steps are too small to
count.
"""

from collections import defaultdict
from collections.abc import Mapping
from functools import lru_cache

from prefect_rlhf.placement.devices.mesh import Backend, Device
from prefect_rlhf.placement.engine_traits import TRAITS
from prefect_rlhf.placement.graph import Call, CallKind, DataflowGraph
from prefect_rlhf.placement.memory.bytes import CONTEXT_BYTES, MIB
from prefect_rlhf.placement.memory.needs import ByteShare
from prefect_rlhf.placement.models.model import ModelSpec
from prefect_rlhf.placement.plan import (
    EngineKind,
    ExecutionPlan,
    ModelInstance,
    Placement,
    device_coordinates,
    instances,
    offloaded_parts,
)

PAIR_BYTES = 544 * MIB
"""Of a NCCL communicator between two GPUs: 24 channels, each with buffers of 9 MiB for a ring and as many for a tree
(github.com/NVIDIA/nccl/issues/964, measured on A100s with NVLink)."""
GROUP_BYTES = 688 * MIB
"""Of one between more, where a tree has two connections (the same)."""
GRAPH_BYTES_A_LAYER = 16 * MIB
"""Of vLLM's captured graphs: it logs 0.21 GiB for 16 layers and about 0.5 GiB for 32 (vllm-project/vllm#11349)."""
REDUCE_BUFFER_BYTES = (8 + 16 + 8 + 128) * MIB
"""Of a vLLM engine with tp > 1: three buffers of its custom all-reduce, and a symmetric buffer, at its largest
(`CustomAllreduce.__init__` and SYMM_MEM_ALL_REDUCE_MAX_SIZES in vllm/distributed/device_communicators, 0.32)."""
DEVICE = "device"
"""The owner of shares that no model owns."""

Members = tuple[Device, ...]


def overhead(graph: DataflowGraph, plan: ExecutionPlan, backend: Backend) -> Mapping[Device, tuple[ByteShare, ...]]:
    """Return the bytes that each device of a plan holds for collectives and graphs from the first step to the last."""
    if backend == "cpu":
        return {}
    groups: dict[Device, set[int]] = defaultdict(set)  # their numbers
    numbers: dict[tuple[str, Members], int] = {}  # equal groups of an engine share a number
    shares: dict[Device, list[ByteShare]] = defaultdict(list)
    users = instances(graph, plan)
    for instance, calls in users.items():
        model = graph.model(instance.role)
        sums_embeddings = "lm" in model.head and model.shape.tied_embeddings
        for members in _groups(instance, frozenset(call.kind for call in calls), sums_embeddings):
            number = numbers.setdefault((instance.engine, members), len(numbers))
            for device in members:
                groups[device].add(number)
        of_engine = [ByteShare(instance.name, what, size, False) for what, size in _of_engine(instance, model) if size]
        for device in instance.devices:
            shares[device] += of_engine
    world = tuple(sorted({device for instance in users for device in instance.devices}))
    if len(world) > 1:  # ranks open the communicator of all of them when they start
        number = numbers.setdefault(("world", world), len(numbers))
        for device in world:
            groups[device].add(number)
    bytes_of = [communicator_bytes(len(members)) for _, members in numbers]
    for device, of_device in groups.items():
        num_bytes = sum(bytes_of[number] for number in of_device)
        shares[device].append(ByteShare(DEVICE, f"{len(of_device)} NCCL communicators", num_bytes, False))
    return {device: tuple(held) for device, held in shares.items()}


def _of_engine(instance: ModelInstance, model: ModelSpec) -> tuple[tuple[str, int], ...]:
    """Return the bytes of an instance's own graphs and buffers on each of its devices, by kind."""
    traits = TRAITS[instance.engine]
    buffers = REDUCE_BUFFER_BYTES if traits.has_reduce_buffers and instance.strategy.tp > 1 else 0
    return ("CUDA graphs", _graph_bytes(instance.engine, model)), ("all-reduce buffers", buffers)


def torch_limits(graph: DataflowGraph, plan: ExecutionPlan, backend: Backend) -> dict[Device, int]:
    """Return the bytes that torch may reserve on each device of a plan: all but CUDA's context and communicators.

    A device whose engine sleeps has no limit. Torch counts the memory of a sleeping engine, which vLLM has unmapped, as
    its own, so a limit would refuse memory that is free. On CPU there are no limits.
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
        limits[device] = plan.cluster.memory_bytes(device.node) - CONTEXT_BYTES - collectives
    return limits


def call_overhead(call: Call, placement: Placement, model: ModelSpec, backend: Backend) -> tuple[int, int]:
    """Return the least bytes of (graphs, communicators) that a call alone adds to each of its devices."""
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


_Axis = tuple[str, ...]
"""Coordinates that the members of a group share; it runs over the others.

`experts` is which of ep shares of them a replica has, `same` which of the groups that have all.
"""
_TP, _PP, _DP, _REPLICA, _MESH = ("dp", "pp"), ("dp", "tp"), ("tp", "pp"), ("dp",), ()
_EP, _SAME_EXPERTS = ("same", "tp", "pp"), ("experts", "tp", "pp")


@lru_cache(maxsize=256)  # many of the plans that a question compares have the same
def _groups(instance: ModelInstance, kinds: frozenset[CallKind], sums_embeddings: bool) -> tuple[Members, ...]:
    """Return the groups of an instance that pass tensors of a GPU, each once.

    Layers reduce over tp, stages send over pp, tokens go to experts over ep. Training sums gradients over dp, their
    norm over the mesh, and a tied embedding's over both ends. Generation in Megatron sends between neighbours and tells
    its replica each token.
    """
    ep = instance.strategy.ep
    axes: list[_Axis] = [_TP, _PP] if ep == 1 else [_TP, _PP, _MESH if TRAITS[instance.engine].experts_over_tp else _EP]
    if "train_step" in kinds:
        axes += [_DP, _MESH] if ep == 1 else [_DP, _MESH, _SAME_EXPERTS]
    if "generate" in kinds and TRAITS[instance.engine].pipelines:
        axes.append(_REPLICA)

    def groups(axis: _Axis) -> list[Members]:
        by_shared: dict[tuple[int, ...], list[Device]] = defaultdict(list)
        for device, at in device_coordinates(instance):
            named = {"dp": at.dp, "tp": at.tp, "pp": at.pp, "experts": at.dp % ep, "same": at.dp // ep}
            by_shared[tuple(named[name] for name in axis)].append(device)
        return [tuple(members) for members in by_shared.values()]

    found = dict.fromkeys(members for axis in axes for members in groups(axis))
    for members in groups(_PP):
        if "train_step" in kinds and sums_embeddings:
            found[members[0], members[-1]] = None
        if "generate" in kinds and TRAITS[instance.engine].pipelines:
            found |= dict.fromkeys(zip(members, members[1:], strict=False))
    return tuple(members for members in found if len(set(members)) > 1)
