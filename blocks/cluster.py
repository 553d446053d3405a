"""Clusters: nodes of one or several kinds, and the folder of their leases."""

import os
from dataclasses import replace
from functools import lru_cache
from pathlib import Path

from prefect.blocks.core import Block
from pydantic import BaseModel, ConfigDict, Field

from prefect_rlhf.blocks.lease import DEFAULT_LEASE_DIRECTORY
from prefect_rlhf.blocks.lease_book import LeaseBook
from prefect_rlhf.blocks.saved import DOCUMENTATION_URL
from prefect_rlhf.errors.errors import InvalidInput
from prefect_rlhf.files.gpus import VISIBLE, visible_gpus
from prefect_rlhf.placement.cost.datasheets.hardware import GIB, Datasheet, parts_of_the_fastest
from prefect_rlhf.placement.cost.datasheets.kinds import GPUS, datasheet
from prefect_rlhf.placement.devices.mesh import MOST_DEVICES, MOST_NODES, Backend, ClusterShape

CPU_MEMORY_GIB = 8.0  # of a rank without a GPU, by default
OTHER_MACHINE = "device_memory_gib or node_kinds for the GPUs of another machine"
DEVICE_FIELD = "node_kinds.device"
DEVICE_NAME = r"[A-Za-z0-9]([\w.-]{0,61}[A-Za-z0-9])?"  # a valid label of Ray


class NodeKind(BaseModel):
    """Equal nodes, for a cluster of several kinds of nodes or with GPUs that its worker cannot see.

    >>> NodeKind(device="a100-80", num_nodes=2).memory_bytes("cuda", otherwise=8 * GIB) // GIB
    79
    """

    model_config = ConfigDict(extra="forbid")

    device: str = Field(
        title="Device",
        pattern=f"^{DEVICE_NAME}$",
        description="The GPUs' datasheet, such as a100-80; without GPUs, any word. Ray's nodes have it as a label.",
    )
    num_nodes: int = Field(1, title="Nodes", ge=1, le=MOST_NODES, description="Number of nodes of this kind.")
    device_memory_gib: float = Field(
        0.0,
        title="Device memory (GiB)",
        ge=0,
        le=1e5,
        description="Memory that a rank may use on a device; 0 takes the datasheet's, or the cluster's without GPUs.",
    )
    speed: float = Field(
        0.0,
        title="Speed",
        ge=0,
        le=1e6,
        description="Speed relative to other kinds, to divide rows; 0 takes the datasheet's, or 1 without GPUs.",
    )

    def sheet(self, backend: Backend) -> Datasheet | None:
        """Return the datasheet of its GPUs; None without GPUs. Raises InvalidInput for GPUs without a datasheet."""
        return None if backend == "cpu" else datasheet(self.device, DEVICE_FIELD, GPUS)

    def memory_bytes(self, backend: Backend, otherwise: int) -> int:
        """Return a device's memory in bytes: the field's value, or the datasheet's, or `otherwise` without a
        datasheet.
        """
        if self.device_memory_gib:
            return int(self.device_memory_gib * GIB)
        sheet = self.sheet(backend)
        return sheet.memory_bytes if sheet else otherwise

    def peak(self, backend: Backend) -> float:
        """Return its datasheet's bfloat16 FLOP/s, for comparison with other kinds; 1.0 without GPUs."""
        sheet = self.sheet(backend)
        return sheet.bfloat16_flops if sheet else 1.0

    def label(self, backend: Backend) -> str:
        """Return these nodes' Ray label: for GPUs the datasheet's name in every spelling, else `device`.

        >>> NodeKind(device="A100-SXM4-80GB").label("cuda"), NodeKind(device="Old").label("cpu")
        ('a100-80', 'Old')
        """
        sheet = self.sheet(backend)
        return sheet.name if sheet else self.device


@lru_cache(maxsize=8)  # the driver's tool takes up to seconds, and the memory of a GPU stays
def least_plan_bytes(number: int, visible: str | None) -> int:
    """Return the memory that plans may count on, on each of this process's first GPUs; `visible` lists its GPUs.

    Raises InvalidInput if this machine lists no GPU.
    """
    seen = visible_gpus(otherwise=OTHER_MACHINE)
    if not seen:
        raise InvalidInput(VISIBLE, visible, f"the number of a GPU, or {OTHER_MACHINE}")
    return min(gpu.plan_bytes for gpu in seen[:number])


class ClusterFields(BaseModel):
    """Fields that a Cluster block and the worker's job variables share."""

    cluster: str = Field(
        "local",
        title="Cluster",
        pattern=r"^[\w.-]+$",
        description="The cluster's name; runs that name the same cluster share it.",
    )
    num_nodes: int = Field(
        1,
        title="Nodes",
        ge=1,
        le=MOST_NODES,
        description="Number of equal nodes; leave it out if `Kinds of nodes` is set.",
    )
    devices_per_node: int = Field(
        2, title="Devices per node", ge=1, le=MOST_DEVICES, description="Number of equal devices in every node."
    )
    device_memory_gib: float = Field(
        0.0,
        title="Device memory (GiB)",
        ge=0,
        le=1e5,
        description="Memory that a rank may use on a device; 0 takes the GPUs' own, or 8 GiB without GPUs.",
    )
    host_memory_gib: float = Field(
        0.0,
        title="Host memory (GiB)",
        ge=0,
        le=1e6,
        description="Memory of each node for data that plans offload from GPUs; 0 sets no limit.",
    )
    kind: Backend = Field("cpu", title="Kind of device", description="cuda for GPUs, cpu for processes without GPUs.")
    node_kinds: list[NodeKind] = Field(
        default_factory=list,
        title="Kinds of nodes",
        description="Nodes of different kinds, in their order:"
        ' [{"device": "a100-80", "num_nodes": 2}, {"device": "v100-32"}].',
    )
    lease_directory: str = Field(
        str(DEFAULT_LEASE_DIRECTORY),
        title="Lease folder",
        description="Folder for the leases' lock files; everyone who uses the devices needs the same folder.",
    )

    @property
    def shape(self) -> ClusterShape:
        """The cluster as plans and leases see it. Raises InvalidInput for fields that contradict each other."""
        memory = int(self.device_memory_gib * GIB) or self._own_memory()
        host = int(self.host_memory_gib * GIB)
        size = (self.num_nodes, self.devices_per_node)
        shape = ClusterShape(self.cluster, *size, memory, host_memory_bytes=host, backend=self.kind)
        return self._of_kinds(shape) if self.node_kinds else shape

    def _own_memory(self) -> int:
        """Return the bytes of a device whose memory is not stated; GPUs of `node_kinds` have their datasheets'."""
        if self.kind == "cpu" or self.node_kinds:
            return int(CPU_MEMORY_GIB * GIB)
        return least_plan_bytes(self.devices_per_node, os.environ.get(VISIBLE))

    def lease_book(self) -> LeaseBook:
        """Return the book of leases on its devices."""
        return LeaseBook(Path(self.lease_directory), self.shape)

    def _of_kinds(self, alike: ClusterShape) -> ClusterShape:
        """Return `alike` with number, memory, labels and speeds of its nodes taken from `node_kinds`."""
        nodes = [kind for kind in self.node_kinds for _ in range(kind.num_nodes)]
        self._check_kinds(len(nodes))
        memory = [node.memory_bytes(self.kind, alike.device_memory_bytes) for node in nodes]
        speeds = [node.speed or node.peak(self.kind) for node in nodes]
        shape = replace(
            alike,
            num_nodes=len(nodes),
            device_memory_bytes=min(memory),
            node_memory_bytes=tuple(memory) if len(set(memory)) > 1 else (),
            node_devices=tuple(node.label(self.kind) for node in nodes),
        )
        return shape.with_speeds(parts_of_the_fastest(speeds), "node_kinds.speed")

    def _check_kinds(self, num_nodes: int) -> None:
        """Raise InvalidInput for a field that contradicts `node_kinds` or is not used with them."""
        if self.num_nodes not in (1, num_nodes):
            raise InvalidInput("num_nodes", self.num_nodes, f"no value, or the {num_nodes} nodes of node_kinds")
        if self.kind == "cuda" and self.device_memory_gib:
            right = "no value: each of node_kinds has its own memory, or its datasheet's"
            raise InvalidInput("device_memory_gib", self.device_memory_gib, right)
        names, speeds = zip(*((kind.label(self.kind), kind.speed) for kind in self.node_kinds), strict=True)
        if len(set(names)) < len(names):
            raise InvalidInput(DEVICE_FIELD, list(names), "each kind once, with all its nodes")
        if any(speeds) and not all(speeds):
            raise InvalidInput("node_kinds.speed", list(speeds), "a speed for every kind, or for no kind")


class Cluster(Block, ClusterFields):
    """Devices that runs lease.

    >>> Cluster(devices_per_node=4).shape.whole.name
    'n0:0-3'
    """

    model_config = ConfigDict(extra="forbid")

    _block_type_name = "RLHF Cluster"
    _block_type_slug = "rlhf-cluster"
    _documentation_url = DOCUMENTATION_URL
    _description = "Nodes of devices that RLHF runs lease."
    _code_example = """
    ```python
    from prefect_rlhf.blocks.cluster import Cluster
    from prefect_rlhf.blocks.lease import lease

    cluster = Cluster.load("BLOCK_NAME")
    with lease(cluster.shape, "n0:0-1") as leased:
        print(leased.devices)
    ```
    """
