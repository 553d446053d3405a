"""Clusters: equal nodes of equal devices, and the folder where their leases are kept."""

from __future__ import annotations

from pathlib import Path

from prefect.blocks.core import Block
from pydantic import BaseModel, ConfigDict, Field

from prefect_rlhf.blocks.lease import DEFAULT_LEASE_DIRECTORY
from prefect_rlhf.blocks.lease_book import LeaseBook
from prefect_rlhf.blocks.saved import DOCUMENTATION_URL
from prefect_rlhf.placement.mesh import Backend, ClusterShape

BYTES_PER_GIB = 1 << 30
MOST_NODES = 10_000
MOST_DEVICES = 1024  # of a node


class ClusterFields(BaseModel):
    """Fields that a Cluster block and the worker's job variables have."""

    cluster: str = Field(
        "local", title="Cluster", pattern=r"^[\w.-]+$", description="Its name; runs that say the same name share it."
    )
    num_nodes: int = Field(1, title="Nodes", ge=1, le=MOST_NODES, description="Number of equal nodes.")
    devices_per_node: int = Field(
        2, title="Devices per node", ge=1, le=MOST_DEVICES, description="Number of equal devices in a node."
    )
    device_memory_gib: float = Field(
        8.0, title="Device memory (GiB)", gt=0, le=1e5, description="Memory that a rank may use on one device."
    )
    host_memory_gib: float = Field(
        0.0,
        title="Host memory (GiB)",
        ge=0,
        le=1e6,
        description="Of each node, for what plans offload from GPUs; 0 sets no limit.",
    )
    kind: Backend = Field("cpu", title="Kind of device", description="cuda for GPUs, cpu for processes without.")
    lease_directory: str = Field(
        str(DEFAULT_LEASE_DIRECTORY),
        title="Lease folder",
        description="Folder of lock files that says who holds which device; the same for all who share the devices.",
    )

    @property
    def shape(self) -> ClusterShape:
        memory = int(self.device_memory_gib * BYTES_PER_GIB)
        host = int(self.host_memory_gib * BYTES_PER_GIB)
        return ClusterShape(self.cluster, self.num_nodes, self.devices_per_node, memory, host_memory_bytes=host)

    def lease_book(self) -> LeaseBook:
        """Return the book that says who holds which of its devices."""
        return LeaseBook(Path(self.lease_directory), self.shape)


class Cluster(Block, ClusterFields):
    """Devices that runs lease.

    >>> Cluster(devices_per_node=4).shape.whole.name
    'n0:0-3'
    """

    model_config = ConfigDict(extra="forbid")

    _block_type_name = "RLHF Cluster"
    _block_type_slug = "rlhf-cluster"
    _documentation_url = DOCUMENTATION_URL
    _description = "Equal nodes of equal devices that RLHF runs lease."
    _code_example = """
    ```python
    from prefect_rlhf.blocks.cluster import Cluster
    from prefect_rlhf.blocks.lease import lease

    cluster = Cluster.load("BLOCK_NAME")
    with lease(cluster.shape, "n0:0-1") as leased:
        print(leased.devices)
    ```
    """
