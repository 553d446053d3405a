"""The form of a gpu-mesh work pool, which a deployment's or a run's job variables may override."""

from __future__ import annotations

from prefect.workers.base import BaseVariables
from pydantic import Field

from prefect_rlhf.blocks.cluster import ClusterFields
from prefect_rlhf.placement.mesh import MOST_DEVICES, MOST_NODES


class MeshFields(ClusterFields):
    """Fields that the variables and the configuration share: which devices, and how the flow run's process is treated.

    No field is optional: Prefect's templates drop empty values, and its form cannot show a nullable word.
    """

    mesh: str = Field(
        "", title="Mesh", description="Devices to lease, such as n0:0-1; empty leases as many as `Number of devices`."
    )
    num_devices: int = Field(
        0,
        title="Number of devices",
        ge=0,
        le=MOST_NODES * MOST_DEVICES,
        description="Lease any aligned mesh of that size; 0 is the whole cluster.",
    )
    min_devices: int = Field(
        0,
        title="Fewest devices",
        ge=0,
        le=MOST_NODES * MOST_DEVICES,
        description="Take the largest free part of the mesh with so many devices; 0 waits for the whole.",
    )
    lease_wait_seconds: float = Field(
        86400.0,
        title="Longest wait (s)",
        ge=0,
        le=90 * 86400,
        description="A run that cannot have its mesh by then fails.",
    )
    max_restarts: int = Field(
        0,
        title="Restarts",
        ge=0,
        le=1000,
        description="How often a run starts again by itself: after a lost rank, a killed process or worker.",
    )
    grace_seconds: float = Field(
        5.0,
        title="Grace (s)",
        ge=0,
        le=3600,
        description="Time that a stopped flow run has before it is killed; to finish a step and write a checkpoint.",
    )
    working_dir: str = Field(
        "", title="Working directory", description="Where the flow run's process starts; empty is a temporary folder."
    )
    stream_output: bool = Field(
        True, title="Stream output", description="Show the flow run's output where the worker runs."
    )


class GpuMeshVariables(MeshFields, BaseVariables):
    """Which devices a flow run leases, and the process that runs it."""

    name: str = Field("", title="Name", description="Name of the process in logs; empty is the flow run's name.")
    command: str = Field("", title="Command", description="Command to start instead of Prefect's own engine.")
    env: dict[str, str | None] = Field(
        default_factory=dict,
        title="Environment variables",
        description="Set for the flow run's process, over the worker's own; null takes one away.",
    )
    labels: dict[str, str] = Field(
        default_factory=dict, title="Labels", description="Kept with the configuration; the worker does not use them."
    )
