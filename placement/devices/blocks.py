"""Blocks of devices that no mesh of a plan divides, so a result for a device holds for its whole block."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache
from itertools import pairwise

from prefect_rlhf.placement.devices.mesh import DeviceMesh

BlocksByMesh = Mapping[DeviceMesh, tuple[DeviceMesh, ...]]
"""The blocks of each mesh, by their first devices."""


def blocks_of(meshes: Iterable[DeviceMesh]) -> BlocksByMesh:
    """Return the blocks of each mesh; two meshes overlap if they have a block in common.

    >>> found = blocks_of([DeviceMesh(0, 2, 0, 8), DeviceMesh(1, 2, 0, 8)])
    >>> [block.name for block in found[DeviceMesh(0, 2, 0, 8)]]
    ['n0:0-7', 'n1:0-7']
    """
    return _blocks_of(tuple(dict.fromkeys(meshes)))


def covers(meshes: Sequence[DeviceMesh], mesh: DeviceMesh) -> bool:
    """Whether the meshes together contain every device of a mesh.

    >>> halves = DeviceMesh(0, 1, 0, 4), DeviceMesh(0, 1, 4, 4)
    >>> covers(halves, DeviceMesh(0, 1, 0, 8)), covers(halves[:1], DeviceMesh(0, 1, 0, 8))
    (True, False)
    """
    blocks = blocks_of([*meshes, mesh])
    return all(any(other.contains(block) for other in meshes) for block in blocks[mesh])


@lru_cache(maxsize=1024)  # every plan that moves no call asks for the same
def _blocks_of(meshes: tuple[DeviceMesh, ...]) -> BlocksByMesh:
    nodes = sorted({node for mesh in meshes for node in (mesh.first_node, mesh.first_node + mesh.num_nodes)})
    indices = sorted({at for mesh in meshes for at in (mesh.first_device, mesh.first_device + mesh.devices_per_node)})
    blocks = [
        DeviceMesh(node, next_node - node, index, next_index - index)
        for node, next_node in pairwise(nodes)
        for index, next_index in pairwise(indices)
    ]
    return {mesh: tuple(block for block in blocks if mesh.contains(block)) for mesh in meshes}
