"""Clusters: nodes of one kind or of several, and the folder where their leases are kept."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from prefect.blocks.core import Block
from pydantic import BaseModel, ConfigDict, Field

from prefect_rlhf.blocks.lease import DEFAULT_LEASE_DIRECTORY
from prefect_rlhf.blocks.lease_book import LeaseBook
from prefect_rlhf.blocks.saved import DOCUMENTATION_URL
from prefect_rlhf.placement.cost.hardware import GIB, GPUS, Datasheet, datasheet, parts_of_the_fastest
from prefect_rlhf.placement.errors import InvalidInput
from prefect_rlhf.placement.mesh import MOST_DEVICES, MOST_NODES, Backend, ClusterShape

DEVICE_MEMORY_GIB = 8.0  # of a device where nobody says
DEVICE_FIELD = "node_kinds.device"
DEVICE_NAME = r"[A-Za-z0-9]([\w.-]{0,61}[A-Za-z0-9])?"  # that Ray takes as a label


class NodeKind(BaseModel):
    """Equal nodes of a cluster whose nodes are of several kinds, or whose GPUs its worker cannot see.

    >>> NodeKind(device="a100-80", num_nodes=2).memory_bytes("cuda", otherwise=8 * GIB) // GIB
    79
    """

    model_config = ConfigDict(extra="forbid")

    device: str = Field(
        title="Device",
        pattern=f"^{DEVICE_NAME}$",
        description="GPUs by their datasheet, such as a100-80; without GPUs any word. Ray's nodes have it as a label.",
    )
    num_nodes: int = Field(1, title="Nodes", ge=1, le=MOST_NODES, description="Number of nodes of this kind.")
    device_memory_gib: float = Field(
        0.0,
        title="Device memory (GiB)",
        ge=0,
        le=1e5,
        description="Memory that a rank may use on one device; 0 is its datasheet's, without GPUs the cluster's.",
    )
    speed: float = Field(
        0.0,
        title="Speed",
        ge=0,
        le=1e6,
        description="Relative to the other kinds, by which rows are shared out; 0 is its datasheet's, without GPUs 1.",
    )

    def sheet(self, backend: Backend) -> Datasheet | None:
        """Return the datasheet of its GPUs; None without GPUs. Raises InvalidInput for GPUs that have none."""
        return None if backend == "cpu" else datasheet(self.device, DEVICE_FIELD, GPUS)

    def memory_bytes(self, backend: Backend, otherwise: int) -> int:
        """Return the memory of a device; `otherwise` is that of one without a datasheet."""
        if self.device_memory_gib:
            return int(self.device_memory_gib * GIB)
        sheet = self.sheet(backend)
        return sheet.memory_bytes if sheet else otherwise

    def peak(self, backend: Backend) -> float:
        """Return what its datasheet says of its speed, to be compared with other kinds'."""
        sheet = self.sheet(backend)
        return sheet.bfloat16_flops if sheet else 1.0

    def label(self, backend: Backend) -> str:
        """Return what Ray's nodes of this kind are labelled with: of a GPU its datasheet's name, however it is written.

        >>> NodeKind(device="A100-SXM4-80GB").label("cuda"), NodeKind(device="Old").label("cpu")
        ('a100-80', 'Old')
        """
        sheet = self.sheet(backend)
        return sheet.name if sheet else self.device


class ClusterFields(BaseModel):
    """Fields that a Cluster block and the worker's job variables have."""

    cluster: str = Field(
        "local", title="Cluster", pattern=r"^[\w.-]+$", description="Its name; runs that say the same name share it."
    )
    num_nodes: int = Field(
        1, title="Nodes", ge=1, le=MOST_NODES, description="Number of equal nodes; left out beside kinds of nodes."
    )
    devices_per_node: int = Field(
        2, title="Devices per node", ge=1, le=MOST_DEVICES, description="Number of equal devices in every node."
    )
    device_memory_gib: float = Field(
        DEVICE_MEMORY_GIB,
        title="Device memory (GiB)",
        gt=0,
        le=1e5,
        description="Memory that a rank may use on one device.",
    )
    host_memory_gib: float = Field(
        0.0,
        title="Host memory (GiB)",
        ge=0,
        le=1e6,
        description="Of each node, for what plans offload from GPUs; 0 sets no limit.",
    )
    kind: Backend = Field("cpu", title="Kind of device", description="cuda for GPUs, cpu for processes without.")
    node_kinds: list[NodeKind] = Field(
        default_factory=list,
        title="Kinds of nodes",
        description="In their order, where nodes are not all alike:"
        ' [{"device": "a100-80", "num_nodes": 2}, {"device": "v100-32"}].',
    )
    lease_directory: str = Field(
        str(DEFAULT_LEASE_DIRECTORY),
        title="Lease folder",
        description="Folder of lock files that says who holds which device; the same for all who share the devices.",
    )

    @property
    def shape(self) -> ClusterShape:
        """The cluster as plans and leases see it. Raises InvalidInput for fields that contradict each other."""
        memory = int(self.device_memory_gib * GIB)
        host = int(self.host_memory_gib * GIB)
        shape = ClusterShape(self.cluster, self.num_nodes, self.devices_per_node, memory, host_memory_bytes=host)
        return self._of_kinds(shape) if self.node_kinds else shape

    def lease_book(self) -> LeaseBook:
        """Return the book that says who holds which of its devices."""
        return LeaseBook(Path(self.lease_directory), self.shape)

    def _of_kinds(self, alike: ClusterShape) -> ClusterShape:
        """Return the cluster with nodes of its kinds, which is otherwise as one whose nodes are alike."""
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
        """Raise InvalidInput for what kinds of nodes contradict, or leave without effect."""
        if self.num_nodes not in (1, num_nodes):
            raise InvalidInput("num_nodes", self.num_nodes, f"the {num_nodes} nodes of node_kinds, or to be left out")
        if self.kind == "cuda" and self.device_memory_gib != DEVICE_MEMORY_GIB:
            right = "to be left out: each of node_kinds says its own, or has its datasheet's"
            raise InvalidInput("device_memory_gib", self.device_memory_gib, right)
        names, speeds = zip(*((kind.label(self.kind), kind.speed) for kind in self.node_kinds), strict=True)
        if len(set(names)) < len(names):
            raise InvalidInput(DEVICE_FIELD, list(names), "each kind once, with all its nodes")
        if any(speeds) and not all(speeds):
            raise InvalidInput("node_kinds.speed", list(speeds), "one for every kind, or none")


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
