"""Clusters and device meshes: the existing devices, and the rectangles of devices that a call may occupy.

A mesh is a range of whole nodes, or an aligned power-of-two slice of a single node (ReaL, section 4). So any two meshes
are disjoint, nested, or overlap in whole nodes.
"""

from __future__ import annotations

import math
import re
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Literal, NamedTuple

from prefect_rlhf.errors.errors import InvalidInput
from prefect_rlhf.placement.devices.hashed_once import HashedOnce, hashed_once

Backend = Literal["cpu", "cuda"]
MOST_NODES = 10_000  # of a cluster
MOST_DEVICES = 1024  # of a node
MOST_ROOM = 0.5  # of a device's memory; a plan that keeps more free, or is told to, would hide a wrong number

_MESH_NAME = re.compile(r"n(\d+)(?:-(\d+))?:(\d+)(?:-(\d+))?", re.ASCII)


@hashed_once
@dataclass(frozen=True, slots=True, order=True)
class DeviceMesh(HashedOnce):
    """A rectangle of devices.

    >>> DeviceMesh(0, 1, 0, 2).name
    'n0:0-1'
    >>> DeviceMesh.parse("n0-1:0-7")
    DeviceMesh(first_node=0, num_nodes=2, first_device=0, devices_per_node=8)
    """

    first_node: int
    num_nodes: int
    first_device: int
    devices_per_node: int

    @property
    def num_devices(self) -> int:
        return self.num_nodes * self.devices_per_node

    @property
    def name(self) -> str:
        """`n0:0-1` is devices 0 and 1 of node 0; `n0-1:0-7` is devices 0 to 7 of nodes 0 and 1."""
        nodes = _span(self.first_node, self.num_nodes)
        return f"n{nodes}:{_span(self.first_device, self.devices_per_node)}"

    @classmethod
    def parse(cls, name: str, field: str = "mesh") -> DeviceMesh:
        """Parse a name such as `n0:0-1`. Raises InvalidInput for any other text."""
        match = _MESH_NAME.fullmatch(name)
        if match is None:
            raise InvalidInput(field, name, "a mesh such as n0:0-1 or n0-1:0-7")
        first_node, last_node, first, last = (int(g) if g else None for g in match.groups())
        assert first_node is not None and first is not None  # the pattern requires both
        num_nodes = 1 if last_node is None else last_node - first_node + 1
        per_node = 1 if last is None else last - first + 1
        if num_nodes < 1 or per_node < 1:
            raise InvalidInput(field, name, "ranges that end after they begin")
        return cls(first_node, num_nodes, first, per_node)

    def devices(self) -> tuple[Device, ...]:
        """Return all devices, node by node."""
        return _devices(self)

    def contains(self, other: DeviceMesh) -> bool:
        """Whether every device of `other` is in this mesh."""
        in_nodes = self.first_node <= other.first_node and other._end_node <= self._end_node
        return in_nodes and self.first_device <= other.first_device and other._end_device <= self._end_device

    def overlaps(self, other: DeviceMesh) -> bool:
        """Whether the meshes share a device."""
        share_nodes = self.first_node < other._end_node and other.first_node < self._end_node
        return share_nodes and self.first_device < other._end_device and other.first_device < self._end_device

    @property
    def _end_node(self) -> int:
        return self.first_node + self.num_nodes

    @property
    def _end_device(self) -> int:
        return self.first_device + self.devices_per_node


class Device(NamedTuple):
    """A device of a cluster; a tuple, because plans of many devices hash and compare devices millions of times.

    >>> str(Device(0, 1))
    'n0:1'
    """

    node: int
    index: int  # type: ignore[assignment]  # hides tuple.index, which no code calls for a device

    def __str__(self) -> str:
        return f"n{self.node}:{self.index}"


@hashed_once
@dataclass(frozen=True, slots=True)
class ClusterShape(HashedOnce):
    """`num_nodes` nodes of `devices_per_node` devices with `device_memory_bytes` each."""

    name: str
    num_nodes: int
    devices_per_node: int
    device_memory_bytes: int
    node_speeds: tuple[float, ...] = ()
    """The speeds of each node's devices, relative to each other; empty if all are equal."""
    node_memory_bytes: tuple[int, ...] = ()
    """The memory of a device of each node; empty if all have `device_memory_bytes`."""
    host_memory_bytes: int = 0
    """The host memory of each node for offloaded models; 0 means unknown."""
    node_devices: tuple[str, ...] = ()
    """The kind of device of each node, such as a100-80; empty if all are of the same unknown kind."""
    backend: Backend = field(default="cuda", compare=False)  # of a lease or site, not of the shape
    """The kind of code that the devices run, as stated by the lease's or site's cluster."""
    headroom: float = field(default=0.0, compare=False)
    """The share of each device's memory that plans must leave free, as stated for a run or a question."""
    room: float = field(default=0.0, compare=False)
    """The share that plans keep free without a headroom, for uncounted memory."""
    leased: DeviceMesh | None = field(default=None, compare=False, repr=False)  # of a lease or site
    """The part that the lease or site has; None means all of it."""

    @property
    def whole(self) -> DeviceMesh:
        return DeviceMesh(0, self.num_nodes, 0, self.devices_per_node)

    @property
    def usable(self) -> DeviceMesh:
        """The devices of the lease or site, by default all devices. Plan files count devices from its first."""
        return self.leased or self.whole

    @property
    def through_ray(self) -> bool:
        """Whether runs find its nodes through Ray; otherwise the cluster is the machine on which they start."""
        return self.num_nodes > 1 or bool(self.node_devices)

    def with_speeds(self, speeds: Sequence[float], field: str = "node_speeds") -> ClusterShape:
        """Return the cluster with these node speeds. Raises InvalidInput unless each node has a speed above 0."""
        if len(speeds) not in (0, self.num_nodes):
            raise InvalidInput(field, list(speeds), f"a speed for each of the {self.num_nodes} nodes of {self.name}")
        if not all(0 < speed < math.inf for speed in speeds):
            raise InvalidInput(field, list(speeds), "numbers above 0")
        return replace(self, node_speeds=tuple(speeds))

    def with_memory(self, memory_bytes: Sequence[int], field: str = "node_memory_bytes") -> ClusterShape:
        """Return the cluster with this device memory by node. Raises InvalidInput unless each node has a value."""
        if len(memory_bytes) not in (0, self.num_nodes):
            right = f"a device's memory for each of the {self.num_nodes} nodes of {self.name}"
            raise InvalidInput(field, list(memory_bytes), right)
        if not all(isinstance(size, int) and size > 0 for size in memory_bytes):
            raise InvalidInput(field, list(memory_bytes), "whole numbers of bytes above 0")
        return replace(self, node_memory_bytes=tuple(memory_bytes))

    def memory_bytes(self, node: int) -> int:
        """The memory that plans may use on each device of a node: without the headroom and the room.

        >>> ClusterShape("mixed", 2, 8, 80 << 30).with_memory((80 << 30, 32 << 30)).memory_bytes(1) >> 30
        32
        """
        return int(self.whole_memory_bytes(node) * (1 - self.kept_share))

    def stated_memory_bytes(self, node: int) -> int:
        """The memory on each device of a node, without your stated headroom but with the room."""
        return int(self.whole_memory_bytes(node) * (1 - self.headroom))

    @property
    def kept_share(self) -> float:
        """The share of each device's memory that plans keep free."""
        return self.headroom + self.room

    def whole_memory_bytes(self, node: int) -> int:
        """The memory on each device of a node with the headroom."""
        return self.node_memory_bytes[node] if self.node_memory_bytes else self.device_memory_bytes

    def smallest_memory_bytes(self, mesh: DeviceMesh) -> int:
        """The memory of a mesh's smallest device."""
        if not self.node_memory_bytes:
            return self.memory_bytes(mesh.first_node)
        return min(self.memory_bytes(node) for node in range(mesh.first_node, mesh.first_node + mesh.num_nodes))

    def check_mesh(self, mesh: DeviceMesh, field: str = "mesh") -> DeviceMesh:
        """Return `mesh`. Raises InvalidInput if it lies outside the cluster or is not aligned."""
        if mesh.first_node + mesh.num_nodes > self.num_nodes:
            raise InvalidInput(field, mesh.name, f"nodes 0 to {self.num_nodes - 1} of cluster {self.name}")
        if mesh.first_device + mesh.devices_per_node > self.devices_per_node:
            raise InvalidInput(field, mesh.name, f"devices 0 to {self.devices_per_node - 1} of each node")
        whole_nodes = mesh.devices_per_node == self.devices_per_node
        width = mesh.devices_per_node
        aligned = mesh.num_nodes == 1 and width & (width - 1) == 0 and mesh.first_device % width == 0
        if not (whole_nodes or aligned):
            raise InvalidInput(field, mesh.name, "whole nodes, or an aligned power-of-two slice of a single node")
        return mesh


def lanes(values: Mapping[Device, Hashable]) -> list[DeviceMesh]:
    """Group a node's consecutive devices with equal values, joined with equal groups of the next nodes.

    >>> values = {Device(node, index): "busy" for node in range(2) for index in range(4)} | {Device(2, 0): "idle"}
    >>> [lane.name for lane in lanes(values)]
    ['n0-1:0-3', 'n2:0']
    """
    runs: list[list[Device]] = []  # each within a node
    for device in sorted(values):
        before = runs[-1][-1] if runs else None
        if before and device == (before.node, before.index + 1) and values[device] == values[before]:
            runs[-1].append(device)
        else:
            runs.append([device])
    merged: list[DeviceMesh] = []
    for run in runs:
        lane = DeviceMesh(run[0].node, 1, run[0].index, len(run))
        above = merged[-1] if merged else lane
        next_node = replace(above, first_node=above.first_node + above.num_nodes, num_nodes=1)
        if lane == next_node and values[run[0]] == values[above.devices()[0]]:
            merged[-1] = replace(above, num_nodes=above.num_nodes + 1)
        else:
            merged.append(lane)
    return merged


def union(meshes: Iterable[DeviceMesh]) -> tuple[DeviceMesh, ...]:
    """Return meshes that together contain all devices of `meshes`, leaving out meshes inside another."""
    distinct = tuple(dict.fromkeys(meshes))
    return tuple(mesh for mesh in distinct if not any(other != mesh and other.contains(mesh) for other in distinct))


def _span(first: int, count: int) -> str:
    return str(first) if count == 1 else f"{first}-{first + count - 1}"


@lru_cache(maxsize=4096)  # planning asks for the devices of the same few hundred meshes again and again
def _devices(mesh: DeviceMesh) -> tuple[Device, ...]:
    return tuple(
        Device(node, device)
        for node in range(mesh.first_node, mesh.first_node + mesh.num_nodes)
        for device in range(mesh.first_device, mesh.first_device + mesh.devices_per_node)
    )
