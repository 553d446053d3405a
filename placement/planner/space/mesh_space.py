"""The mesh space of a lease: all its meshes as intervals of its devices, and classes of meshes with equal costs."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field

from prefect_rlhf.placement.cost.sources import CostSources
from prefect_rlhf.placement.devices.mesh import ClusterShape, DeviceMesh
from prefect_rlhf.placement.search.problem import Interval

EVERY_COUNT = 32  # largest lease, in nodes, whose meshes may have any number of nodes
THREE_DIGITS = 64  # largest lease whose meshes may have numbers of three binary digits and zeros; beyond it two digits


@dataclass(frozen=True, slots=True)
class MeshSpace:
    """`meshes[i]` is `intervals[i]` of the lease; `classes` are meshes of the same shape on nodes of the same kinds.

    Kinds of nodes are equal if hardware, speeds and memory are. `nodes` has each device's node. A lease of more than
    `EVERY_COUNT` nodes has only meshes with round numbers of nodes (`node_counts`).
    """

    meshes: tuple[DeviceMesh, ...]
    intervals: tuple[Interval, ...]
    classes: tuple[tuple[int, ...], ...]
    nodes: tuple[int, ...]
    places: Mapping[DeviceMesh, tuple[int, int]] = field(compare=False)
    """The index and class of a mesh. A large lease has thousands of meshes, so a call must not search them all."""

    @classmethod
    def of(
        cls, cluster: ClusterShape, lease: DeviceMesh, sources: CostSources, also: Iterable[DeviceMesh] = ()
    ) -> MeshSpace:
        """Return every mesh that a call may have on the lease, and the meshes `also`, which lie on it.

        >>> from prefect_rlhf.placement.cost.datasheets.hardware import Hardware
        >>> from prefect_rlhf.placement.cost.datasheets.kinds import DATASHEETS
        >>> desk = ClusterShape("desk", 1, 2, 8 << 30)
        >>> space = MeshSpace.of(desk, desk.whole, CostSources.equal_nodes(Hardware(DATASHEETS["h100"], 2), 1))
        >>> [mesh.name for mesh in space.meshes], space.classes
        (['n0:0', 'n0:1', 'n0:0-1'], ((0, 1), (2,)))
        """
        meshes = tuple(dict.fromkeys((*meshes_of(cluster, lease), *also)))
        alike: dict[Hashable, list[int]] = defaultdict(list)
        for index, mesh in enumerate(meshes):
            nodes_of = slice(mesh.first_node, mesh.first_node + mesh.num_nodes)
            kinds = sources.nodes[nodes_of], cluster.node_speeds[nodes_of], cluster.node_memory_bytes[nodes_of]
            alike[mesh.num_nodes, mesh.devices_per_node, kinds].append(index)
        intervals = []
        for mesh in meshes:
            first_node, first_device = mesh.first_node - lease.first_node, mesh.first_device - lease.first_device
            start = first_node * lease.devices_per_node + first_device
            intervals.append(Interval(start, start + mesh.num_devices, mesh.name))
        nodes = tuple(device.node for device in lease.devices())
        classes = tuple(tuple(members) for members in alike.values())
        places = {meshes[index]: (index, number) for number, members in enumerate(classes) for index in members}
        return cls(meshes, tuple(intervals), classes, nodes, places)

    def first_of(self, mesh_class: int) -> DeviceMesh:
        """Return the mesh that represents its class."""
        return self.meshes[self.classes[mesh_class][0]]

    def class_of(self, mesh: DeviceMesh) -> int:
        """Return the class of a mesh of the space."""
        return self.places[mesh][1]

    @property
    def left_out(self) -> str:
        """The meshes that a call may have but that are not searched, in words; empty if all are searched."""
        counts = sorted({mesh.num_nodes for mesh in self.meshes})
        left = [count for count in range(1, counts[-1]) if count not in counts]
        return (
            f"meshes of {', '.join(map(str, left[:4]))}, ... nodes: {len(left)} numbers that are not round"
            if left
            else ""
        )


def node_counts(num_nodes: int) -> list[int]:
    """Return the numbers of nodes that a mesh may have: all or, for a large lease, round numbers and its halves.

    Round numbers have three binary digits and then zeros, each at most a quarter larger than the previous. If there are
    too many of them to search in half a minute, they have two digits, each at most a half larger.

    >>> node_counts(5), node_counts(50)[7:]
    ([1, 2, 3, 4, 5], [8, 10, 12, 13, 14, 16, 20, 24, 25, 28, 32, 40, 48, 50])
    >>> node_counts(128)
    [1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128]
    """
    if num_nodes <= EVERY_COUNT:
        return list(range(1, num_nodes + 1))
    most_digits = 3 if num_nodes <= THREE_DIGITS else 2
    counts = {digits << zeros for digits in range(1, 1 << most_digits) for zeros in range(num_nodes.bit_length())}
    parts = {num_nodes}
    while parts - {0}:
        counts |= parts
        parts = {half for part in parts for half in (part // 2, part - part // 2) if half < part}
    return sorted(count for count in counts if 1 <= count <= num_nodes)


def meshes_of(cluster: ClusterShape, lease: DeviceMesh) -> Iterator[DeviceMesh]:
    """Yield aligned power-of-two slices of the lease's nodes, then ranges of whole nodes (see `mesh`)."""
    nodes = range(lease.first_node, lease.first_node + lease.num_nodes)
    stop = lease.first_device + lease.devices_per_node
    width = 1
    while width <= lease.devices_per_node:
        if width < cluster.devices_per_node:
            aligned = [first for first in range(lease.first_device, stop, width) if first % width == 0]
            yield from (DeviceMesh(n, 1, first, width) for n in nodes for first in aligned if first + width <= stop)
        width *= 2
    if lease.devices_per_node == cluster.devices_per_node:
        for count in node_counts(lease.num_nodes):
            yield from (DeviceMesh(n, count, 0, lease.devices_per_node) for n in nodes if n + count <= nodes.stop)
