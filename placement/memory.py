"""What a plan keeps on each device all the time, in bytes: weights, gradients, optimizer states, key-value cache.

Megatron's cache counts as if it stayed, though it is there only while a call generates.

Activations and other passing tensors are not counted one by one; `WORKING_SHARE` of each device is left to them.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType

from prefect_rlhf.placement.errors import InvalidInput
from prefect_rlhf.placement.graph import Call, DataflowGraph
from prefect_rlhf.placement.instances import instances, offloaded_parts
from prefect_rlhf.placement.layout import layout_of
from prefect_rlhf.placement.mesh import Device
from prefect_rlhf.placement.model import Dtype, ModelSpec
from prefect_rlhf.placement.plan import ExecutionPlan, ModelInstance, Part
from prefect_rlhf.placement.reshard import num_elements
from prefect_rlhf.placement.stages import stages

GRADIENT_BYTES = 4  # gradients are summed in float32
ADAM_BYTES = 8  # two float32 moments
MAIN_WEIGHT_BYTES = 4  # the optimizer's float32 copy of weights that compute in bfloat16
OPTIMIZER_PART = frozenset({"gradients", "optimizer"})  # what offload: optimizer moves
WORKING_SHARE = 0.2  # of a device's memory: activations, logits, communication buffers
WEIGHT_BYTES: Mapping[Dtype, int] = MappingProxyType({"float32": 4, "bfloat16": 2})
DEFAULT_SEQUENCE_LENGTH = 1024  # of the key-value cache, where nobody says
GIB = 1 << 30


@dataclass(frozen=True, slots=True)
class Holding:
    """`num_bytes` of one kind (`what`) that an instance keeps on a device while it is there."""

    device: Device
    instance: ModelInstance
    what: str
    num_bytes: int


def holdings(plan: ExecutionPlan, graph: DataflowGraph, max_sequence_length: int) -> tuple[Holding, ...]:
    """All that the plan's instances keep, the offloaded ones included."""
    return tuple(
        holding
        for instance, calls in instances(graph, plan).items()
        for holding in _of_instance(instance, calls, graph.model(instance.role), max_sequence_length)
    )


def peak_bytes(plan: ExecutionPlan, graph: DataflowGraph, held: Sequence[Holding]) -> dict[Device, int]:
    """The most that each device keeps at once: what stays, and the largest of what comes and goes.

    The augmented graph never lets two offloaded instances or optimizers be on one device together, except the two
    instances that a reallocate copies between; those count together.
    """
    parts = offloaded_parts(graph, plan)
    stays: dict[Device, int] = defaultdict(int)
    visits: dict[Device, dict[tuple[str, Part], int]] = defaultdict(lambda: defaultdict(int))
    for holding in held:
        part = _offloaded_part(holding, parts)
        if part is None:
            stays[holding.device] += holding.num_bytes
        else:  # by role, since a reallocate has both instances of its role there
            visits[holding.device][holding.instance.role, part] += holding.num_bytes
    devices = sorted({holding.device for holding in held})
    return {device: stays[device] + max(visits[device].values(), default=0) for device in devices}


def check_memory(
    plan: ExecutionPlan, graph: DataflowGraph, max_sequence_length: int = DEFAULT_SEQUENCE_LENGTH
) -> ExecutionPlan:
    """Return `plan`, or raise InvalidInput with a table of what fills the fullest device when it does not fit."""
    held = holdings(plan, graph, max_sequence_length)
    peaks = peak_bytes(plan, graph, held)
    usable = usable_bytes(plan)
    fullest = max(peaks, key=lambda device: peaks[device], default=None)
    if fullest is None or peaks[fullest] <= usable:
        return plan
    whole = plan.cluster.device_memory_bytes
    raise InvalidInput(
        f"plan {plan.name}: memory of {fullest}",
        f"{peaks[fullest] / GIB:.2f} GiB",
        f"at most {usable / GIB:.2f} GiB ({1 - WORKING_SHARE:.0%} of {whole / GIB:.2f} GiB; the rest is for "
        f"activations); offload frozen roles or optimizers, raise tp or pp, or take more devices. It holds:\n"
        + memory_table([holding for holding in held if holding.device == fullest], plan, graph),
    )


def usable_bytes(plan: ExecutionPlan) -> int:
    """What of each device's memory a plan may fill all the time."""
    return int(plan.cluster.device_memory_bytes * (1 - WORKING_SHARE))


def memory_table(held: Sequence[Holding], plan: ExecutionPlan, graph: DataflowGraph) -> str:
    """Holdings as lines, the largest first."""
    parts = offloaded_parts(graph, plan)
    return "\n".join(
        f"  {holding.num_bytes / GIB:8.3f} GiB  {holding.device}  {holding.instance.name}: {holding.what}"
        + (" (offloaded between its uses)" if _offloaded_part(holding, parts) else "")
        for holding in sorted(held, key=lambda holding: -holding.num_bytes)
    )


def offload_to_fit(
    plan: ExecutionPlan, graph: DataflowGraph, max_sequence_length: int = DEFAULT_SEQUENCE_LENGTH
) -> ExecutionPlan:
    """Offload frozen instances, the largest first, until the plan fits; all of them when it never does.

    Trained roles stay: what they would have to move, optimizer states and all, is needed in every step.
    """
    held = holdings(plan, graph, max_sequence_length)
    for instance in _largest_first(held, [role for role in plan_roles(graph) if graph.trained_by(role) is None]):
        peaks = peak_bytes(plan, graph, held)
        if max(peaks.values(), default=0) <= usable_bytes(plan):
            break
        plan = _offload(plan, instances(graph, plan)[instance])
    return plan


def _offloaded_part(holding: Holding, parts: Mapping[ModelInstance, Part]) -> Part | None:
    """The part with which a holding comes and goes; None where it stays."""
    part = parts.get(holding.instance)
    return None if part == "optimizer" and holding.what not in OPTIMIZER_PART else part


def plan_roles(graph: DataflowGraph) -> tuple[str, ...]:
    """The roles of the graph's models that calls use."""
    return tuple(dict.fromkeys(call.role for call in graph if call.role is not None))


def _largest_first(held: Sequence[Holding], roles: Sequence[str]) -> list[ModelInstance]:
    sizes: dict[ModelInstance, int] = defaultdict(int)
    for holding in held:
        if holding.instance.role in roles:
            sizes[holding.instance] += holding.num_bytes
    return sorted(sizes, key=lambda instance: -sizes[instance])


def _offload(plan: ExecutionPlan, calls: Sequence[Call]) -> ExecutionPlan:
    names = {call.name for call in calls}
    changed = ((name, replace(old, offload="all") if name in names else old) for name, old in plan.placements)
    return replace(plan, placements=tuple(changed))


def _of_instance(
    instance: ModelInstance, calls: Sequence[Call], model: ModelSpec, max_sequence_length: int
) -> Iterator[Holding]:
    layout = layout_of(instance, model, instance.mesh)
    trained = any(call.kind == "train_step" for call in calls)
    rows = max((call.num_rows for call in calls if call.kind == "generate"), default=0) // instance.strategy.dp
    stage = {device: at.pp for device, at in zip(instance.devices, instance.strategy.coordinates(), strict=True)}
    layers = [len(held) for held in stages(model.shape.num_layers, instance.strategy.pp)]
    for rank, device in enumerate(instance.mesh.devices()):
        elements = sum(num_elements(region) for region in layout.of_rank(rank).values())
        yield Holding(device, instance, "weights", elements * WEIGHT_BYTES[model.dtype])
        if trained:
            yield Holding(device, instance, "gradients", elements * GRADIENT_BYTES)
            state = ADAM_BYTES + (MAIN_WEIGHT_BYTES if model.dtype != "float32" else 0)
            yield Holding(device, instance, "optimizer", elements * state // instance.strategy.dp)
        if rows:
            per_token = cache_bytes_per_token(model, instance.strategy.tp, layers[stage[device]])
            cached = rows * max_sequence_length * per_token
            yield Holding(device, instance, "key-value cache", cached)


def cache_bytes_per_token(model: ModelSpec, tp: int, num_layers: int) -> int:
    """Keys and values of one token on one device that has so many layers."""
    shape = model.shape
    return 2 * num_layers * (shape.num_kv_heads // tp) * shape.head_dim * WEIGHT_BYTES[model.dtype]
