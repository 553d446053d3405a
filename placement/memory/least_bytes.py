"""A lower bound, over all plans, on the bytes that a call needs on some device: proves that no change of plan
suffices.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from prefect_rlhf.placement.cost.call_bytes import CallOnStage
from prefect_rlhf.placement.cost.execution import Execution
from prefect_rlhf.placement.cost.paged_cache import gib_above, whole_cache_bytes
from prefect_rlhf.placement.cost.sizes import ModelSizes
from prefect_rlhf.placement.cost.uneven import different_works
from prefect_rlhf.placement.cost.workload import CallWork, Workload
from prefect_rlhf.placement.devices.mesh import Backend, ClusterShape, DeviceMesh
from prefect_rlhf.placement.devices.strategy import strategies
from prefect_rlhf.placement.engine_traits import TRAITS
from prefect_rlhf.placement.graph import Call, DataflowGraph
from prefect_rlhf.placement.layout.experts import with_expert_degrees
from prefect_rlhf.placement.memory.bytes import byte_size, usable_bytes
from prefect_rlhf.placement.memory.overhead import call_overhead
from prefect_rlhf.placement.plan import Placement
from prefect_rlhf.placement.plans.check import able_engines, violations
from prefect_rlhf.placement.words.table import thriftiest

MOST_NODES = 16  # of a lease: with more, the meshes are too many for a refusal


def proved_too_large(graph: DataflowGraph, workload: Workload, cluster: ClusterShape, backend: Backend) -> str:
    """Say in words that some call fits under no plan of the usable devices; empty if this is not proved.

    While a call runs, the devices of its mesh hold its weights (for a train_step also gradients and optimizer) and the
    call's own tensors, with any other calls. So these bytes alone are a lower bound for every plan: with the mesh and
    the strategy that fill the fullest device least, the most micro-batches, all layers recomputed, and the smallest
    cache. If they exceed the largest device, no plan fits.
    """
    lease = cluster.usable
    if lease.num_nodes > MOST_NODES:
        return ""
    nodes = range(lease.first_node, lease.first_node + lease.num_nodes)
    most = usable_bytes(max(cluster.memory_bytes(node) for node in nodes), backend)
    needed = {
        call.name: min(
            (_bytes(call, each, graph, workload, backend) for each in _ways(call, graph, lease, backend)), default=0
        )
        for call in graph
        if call.role is not None
    }
    call, least = max(needed.items(), key=lambda item: item[1])
    if least <= most:
        return ""
    needs, has = byte_size(least), byte_size(most)
    return f"no plan fits these devices: {call} needs {needs} of one, and a plan may fill {has}"


def _ways(call: Call, graph: DataflowGraph, lease: DeviceMesh, backend: Backend) -> Iterator[Placement]:
    """Yield the placement that needs least of each size of mesh and each strategy."""
    model = graph.model(call.role or "")
    for mesh in _meshes(lease):
        for engine in able_engines(call, graph, backend):
            for strategy in strategies(mesh.num_devices):
                for spread in with_expert_degrees(strategy, model, engine):
                    plain = Placement(mesh, spread, engine)
                    if not any(violations(call, plain, graph, backend)):
                        yield plain


def _meshes(lease: DeviceMesh) -> Iterator[DeviceMesh]:
    """Yield a mesh of each size: parts of a node, then whole nodes."""
    for count in range(1, lease.devices_per_node + 1):
        yield replace(lease, num_nodes=1, devices_per_node=count)
    for num_nodes in range(2, lease.num_nodes + 1):
        yield replace(lease, num_nodes=num_nodes)


def _bytes(call: Call, plain: Placement, graph: DataflowGraph, workload: Workload, backend: Backend) -> int:
    """Bytes of the fullest device of a placement with everything that saves memory."""
    model, own = graph.model(call.role or ""), workload.of(call.rows)
    sizes = ModelSizes.of(model)
    placed = thriftiest(call, plain, graph)
    if TRAITS[plain.engine].paged_cache:
        placed = replace(placed, cache_gib=gib_above(whole_cache_bytes(1, own.longest, sizes, plain.strategy.tp)))
    overhead = sum(call_overhead(call, placed, model, backend))
    execution, last = Execution.of(placed), placed.strategy.pp - 1
    found = [
        CallOnStage(work, execution, sizes, placed.engine, stage, work.workload.longest, backend == "cpu").as_planned()
        for work in different_works(CallWork.of(call, workload), placed, ())
        for stage in sorted({0, last})
    ]
    return max(terms.total for terms in found) + overhead
