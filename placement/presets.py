"""Plans by name. Each preset is a rule that gives every call of any graph a placement on the leased mesh."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from types import MappingProxyType

from prefect_rlhf.placement.check import ENGINES, problems
from prefect_rlhf.placement.errors import InvalidInput
from prefect_rlhf.placement.fit import DEFAULT_SEQUENCE_LENGTH, check_memory, fits, offload_to_fit
from prefect_rlhf.placement.graph import Call, DataflowGraph
from prefect_rlhf.placement.lease import DeviceKind
from prefect_rlhf.placement.mesh import ClusterShape, DeviceMesh
from prefect_rlhf.placement.plan import ExecutionPlan, Placement
from prefect_rlhf.placement.strategy import Strategy

Rule = Callable[[Call, DeviceMesh, DataflowGraph], DeviceMesh]
"""Which part of the leased mesh a call gets; a computation takes its first device."""


def preset(
    name: str,
    graph: DataflowGraph,
    cluster: ClusterShape,
    mesh: DeviceMesh,
    max_sequence_length: int = DEFAULT_SEQUENCE_LENGTH,
    kind: DeviceKind = "cuda",
) -> ExecutionPlan:
    """The plan that preset `name` gives `graph` on the leased `mesh`: as much data parallelism as is legal and fits.

    Where memory is short, frozen roles are offloaded, and then models are split over more devices. Raises InvalidInput
    when no legal plan exists or none fits.
    """
    rule = PRESETS.get(name)
    if rule is None:
        raise InvalidInput("plan", name, f"a plan file or one of the presets {', '.join(PRESETS)}")
    cluster.check_mesh(mesh)
    refused: list[InvalidInput] = []
    too_large: list[ExecutionPlan] = []
    for least in (n for n in range(1, mesh.num_devices + 1) if mesh.num_devices % n == 0):
        try:
            placements = tuple((call.name, _place(call, rule(call, mesh, graph), graph, least)) for call in graph)
        except InvalidInput as error:
            refused.append(error)
            continue
        plan = offload_to_fit(ExecutionPlan(name, cluster, placements), graph, max_sequence_length, kind)
        if fits(plan, graph, max_sequence_length, kind):
            return plan
        too_large.append(plan)
    if too_large:
        return check_memory(too_large[0], graph, max_sequence_length, kind)  # raises, and says what would help
    raise refused[0]


def flattening(call: Call, mesh: DeviceMesh, graph: DataflowGraph) -> DeviceMesh:
    """Every call on the whole mesh, one after the other."""
    return mesh


def side_by_side(call: Call, mesh: DeviceMesh, graph: DataflowGraph) -> DeviceMesh:
    """Reference inference on one half, reward and critic inference on the other, so that they overlap; all else whole.

    Inference calls that give log-probabilities take the first half.
    """
    if call.kind != "inference":
        return mesh
    first, second = halves(mesh)
    return first if "logprobs" in call.outputs else second


def split(call: Call, mesh: DeviceMesh, graph: DataflowGraph) -> DeviceMesh:
    """Models with a scalar head (critic, reward) on one half, the others on the other; generation on all.

    So actor and critic train at the same time. NeMo-Aligner's placement, as HybridFlow (section 8.3) compares it.
    """
    if call.kind == "generate" or call.role is None:
        return mesh
    first, second = halves(mesh)
    return second if graph.model(call.role).head == "scalar" else first


def separation(call: Call, mesh: DeviceMesh, graph: DataflowGraph) -> DeviceMesh:
    """Generation and inference on one half, training on the other: with staleness 1 both have work at the same time.

    The strategy of that name in Adaptive Placement and Parallelism (Xiao et al. 2023, arXiv:2312.11819, section V-A2):
    actor and critic have a copy on each half.
    """
    first, second = halves(mesh)
    return second if call.kind in ("train_step", "compute") else first


PRESETS: Mapping[str, Rule] = MappingProxyType(
    {"flattening": flattening, "side_by_side": side_by_side, "split": split, "separation": separation}
)


def halves(mesh: DeviceMesh) -> tuple[DeviceMesh, DeviceMesh]:
    """Two disjoint meshes of equal size: half of the nodes each, or half of one node's devices.

    >>> [half.name for half in halves(DeviceMesh(0, 1, 0, 2))]
    ['n0:0', 'n0:1']
    """
    if mesh.num_nodes > 1 and mesh.num_nodes % 2 == 0:
        count = mesh.num_nodes // 2
        first = replace(mesh, num_nodes=count)
        return first, replace(first, first_node=mesh.first_node + count)
    count = mesh.devices_per_node // 2
    if mesh.num_nodes > 1 or count * 2 != mesh.devices_per_node:
        raise InvalidInput("mesh", mesh.name, "a mesh of two equal halves for this preset")
    first = replace(mesh, devices_per_node=count)
    return first, replace(first, first_device=mesh.first_device + count)


def _place(call: Call, mesh: DeviceMesh, graph: DataflowGraph, least: int) -> Placement:
    """The first legal strategy that splits the call's model over at least `least` devices, or over all of its mesh."""
    if call.kind == "compute":
        first = DeviceMesh(mesh.first_node, 1, mesh.first_device, 1)
        return Placement(first, Strategy(), "python")
    refused: list[InvalidInput] = []
    for strategy in strategies(mesh.num_devices):
        if strategy.tp * strategy.pp < min(least, mesh.num_devices):
            continue
        placement = Placement(mesh, strategy, ENGINES[call.kind][0])
        found = list(problems(call, placement, graph))
        if not found:
            return placement
        refused.extend(found[:1])
    raise InvalidInput("mesh", mesh.name, f"devices that divide the work of {call.name} ({refused[0]})")


def strategies(num_devices: int) -> Iterator[Strategy]:
    """All strategies for so many devices: most data parallelism first, then tensor before pipeline parallelism.

    >>> [str(strategy) for strategy in strategies(4)]
    ['dp4', 'dp2 tp2', 'dp2 pp2', 'tp4', 'tp2 pp2', 'pp4']
    """
    for dp in range(num_devices, 0, -1):
        for tp in range(num_devices, 0, -1):
            if num_devices % (dp * tp) == 0:
                yield Strategy(dp, tp, num_devices // (dp * tp))
