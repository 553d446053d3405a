"""Parts of a plan space: plans that keep kinds of nodes apart, and plans with calls pinned to meshes.

Clusters with several kinds of nodes usually train on one kind and infer on the same or another kind (Xiao et al. 2023,
arXiv:2312.11819, section V-A2). Each such part of the space is small when searched separately. So a plan for all nodes
is at least as good as a plan for the nodes of a single kind.
"""

from collections.abc import Hashable, Iterator, Mapping
from dataclasses import replace
from itertools import product

from prefect_rlhf.errors.errors import InvalidInput
from prefect_rlhf.placement.devices.mesh import DeviceMesh
from prefect_rlhf.placement.planner.space.candidates import CostContext
from prefect_rlhf.placement.planner.space.plan_problem import PlanSpace


def divisions(space: PlanSpace) -> Iterator[PlanSpace]:
    """Yield, for each pair of kinds of nodes, the plans that train and generate on the first, and infer on the second.

    Yields no plan if all nodes are equal; pairs on which some call cannot run are left out.
    """
    context, meshes = space.context, space.context.space
    kinds = list(dict.fromkeys(_kind(context, node) for node in meshes.nodes))
    if len(kinds) == 1:
        return
    kinds_of_class = []
    for mesh_class in range(len(meshes.classes)):
        mesh = meshes.first_of(mesh_class)
        kinds_of_class.append({_kind(context, n) for n in range(mesh.first_node, mesh.first_node + mesh.num_nodes)})
    for trains, infers in product(kinds, repeat=2):
        part = {}
        for name, options in space.candidates.items():
            wanted = {infers if context.graph.call(name).kind == "inference" else trains}
            part[name] = tuple(option for option in options if kinds_of_class[option.mesh_class] == wanted)
        if all(part.values()):
            yield PlanSpace(context, part)


def _kind(context: CostContext, node: int) -> Hashable:
    """Nodes of a kind have the same devices; they may have other speeds."""
    return context.site.sources.nodes[node].device, context.site.cluster.memory_bytes(node)


def pinned(space: PlanSpace, meshes: Mapping[str, DeviceMesh]) -> PlanSpace:
    """Return the plans with the calls in `meshes` on these meshes, each of which gets its own class.

    Raises InvalidInput for an unknown call, a mesh outside the lease, or a mesh that a call does not fit.
    """
    mesh_space, candidates = space.context.space, dict(space.candidates)
    for name, mesh in meshes.items():
        if name not in candidates:
            raise InvalidInput(f"pins.{name}", mesh.name, f"a call with a model: {', '.join(candidates)}")
        if mesh not in mesh_space.places:
            raise InvalidInput(f"pins.{name}", mesh.name, "a mesh of the lease: some of its nodes, or a part of a node")
        index, own_class = mesh_space.places[mesh][0], len(mesh_space.classes)
        candidates[name] = tuple(
            replace(option, mesh_class=own_class)
            for option in space.candidates[name]
            if index in mesh_space.classes[option.mesh_class]
        )
        if not candidates[name]:
            raise InvalidInput(f"pins.{name}", mesh.name, "a mesh that can run it and has the memory")
        mesh_space = replace(mesh_space, classes=(*mesh_space.classes, (index,)))
    return PlanSpace(replace(space.context, space=mesh_space), candidates)
