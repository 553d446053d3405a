"""Plans that keep kinds of nodes apart: training on one, and inference on it or on another.

The rule of thumb for clusters of several kinds (Xiao et al. 2023, arXiv:2312.11819, section V-A2). Searched by itself,
each such part of the space is small; so a plan for all nodes is at least as good as one for the nodes of one kind.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Mapping
from dataclasses import replace
from itertools import product

from prefect_rlhf.placement.errors import InvalidInput
from prefect_rlhf.placement.mesh import DeviceMesh
from prefect_rlhf.placement.planner.candidates import Candidates, CostContext


def divisions(setting: CostContext, found: Candidates) -> Iterator[Candidates]:
    """For each pair of kinds: the candidates that train and generate on the first, and infer on the second.

    None where all nodes are of one kind; those in which some call can run nowhere are left out.
    """
    kinds = list(dict.fromkeys(_kind(setting, node) for node in setting.line.nodes))
    if len(kinds) == 1:
        return
    of_class = [_kinds_of(setting, mesh_class) for mesh_class in range(len(setting.line.classes))]
    for trains, infers in product(kinds, repeat=2):
        wanted = {name: {infers if setting.graph.call(name).kind == "inference" else trains} for name in found}
        kept = {
            name: tuple(one for one in every if of_class[one.mesh_class] == wanted[name])
            for name, every in found.items()
        }
        if all(kept.values()):
            yield kept


def _kinds_of(setting: CostContext, mesh_class: int) -> set[Hashable]:
    mesh = setting.line.first_of(mesh_class)
    return {_kind(setting, node) for node in range(mesh.first_node, mesh.first_node + mesh.num_nodes)}


def _kind(setting: CostContext, node: int) -> Hashable:
    """Nodes of one kind have the same devices; they may have other speeds."""
    return setting.sources.nodes[node].device, setting.cluster.memory_bytes(node)


def pinned(setting: CostContext, found: Candidates, meshes: Mapping[str, DeviceMesh]) -> tuple[CostContext, Candidates]:
    """The candidates without those of the calls in `meshes` on any other mesh, which has a class of its own then.

    Raises InvalidInput for an unknown call, a mesh that the lease does not have, and one that a call does not fit.
    """
    line, kept = setting.line, dict(found)
    for name, mesh in meshes.items():
        if name not in found:
            raise InvalidInput(f"pins.{name}", mesh.name, f"a call with a model: {', '.join(found)}")
        if mesh not in line.meshes:
            raise InvalidInput(f"pins.{name}", mesh.name, "a mesh of the lease: some of its nodes, or a part of one")
        index, own = line.meshes.index(mesh), len(line.classes)
        here = [one for one in found[name] if index in line.classes[one.mesh_class]]
        if not here:
            raise InvalidInput(f"pins.{name}", mesh.name, "a mesh that divides its work and on which it fits")
        kept[name] = tuple(replace(one, mesh_class=own) for one in here)
        line = replace(line, classes=(*line.classes, (index,)))
    return replace(setting, line=line), kept
