"""The form of a gpu-mesh work pool, which a deployment's or a run's job variables may override."""

from prefect.workers.base import BaseVariables
from pydantic import Field, GetJsonSchemaHandler
from pydantic.json_schema import JsonSchemaValue
from pydantic_core import CoreSchema

from prefect_rlhf.blocks.cluster import ClusterFields
from prefect_rlhf.files.storable import TEXT, any_value, storable
from prefect_rlhf.placement.devices.mesh import MOST_DEVICES, MOST_NODES


class MeshFields(ClusterFields):
    """Fields shared by the variables and the configuration: the devices, and how to run the flow run's process.

    No field is optional, because Prefect's templates drop empty values and its form cannot show a nullable string.
    """

    mesh: str = Field(
        "", title="Mesh", description="Devices to lease, such as n0:0-1; if empty, `Number of devices` decides."
    )
    num_devices: int = Field(
        0,
        title="Number of devices",
        ge=0,
        le=MOST_NODES * MOST_DEVICES,
        description="Lease this many devices side by side, aligned for training; 0 leases the whole cluster.",
    )
    min_devices: int = Field(
        0,
        title="Fewest devices",
        ge=0,
        le=MOST_NODES * MOST_DEVICES,
        description="Accept the largest free part of the mesh with at least this many devices; 0 waits for all.",
    )
    lease_wait_seconds: float = Field(
        86400.0,
        title="Longest wait (s)",
        ge=0,
        le=90 * 86400,
        description="The run fails if it cannot lease its mesh within this time.",
    )
    max_restarts: int = Field(
        0,
        title="Restarts",
        ge=0,
        le=1000,
        description="How often to restart after a lost rank, a killed process or a killed worker.",
    )
    grace_seconds: float = Field(
        5.0,
        title="Grace (s)",
        ge=0,
        le=3600,
        description="How long a stopped run may take to finish its step and write a checkpoint before it is killed.",
    )
    working_dir: str = Field(
        "", title="Working directory", description="Start folder of the process; if empty, a temporary folder."
    )
    stream_output: bool = Field(
        True, title="Stream output", description="Show the flow run's output in the worker's terminal."
    )


class GpuMeshVariables(MeshFields, BaseVariables):
    """The devices that a flow run leases, and the process that runs it."""

    name: str = Field("", title="Name", description="Name of the process in logs; if empty, the flow run's name.")
    command: str = Field("", title="Command", description="Command to start instead of Prefect's own engine.")
    env: dict[str, str | None] = Field(
        default_factory=dict,
        title="Environment variables",
        description="Environment variables for the flow run's process, added to the worker's; null removes a variable.",
    )
    labels: dict[str, str] = Field(
        default_factory=dict, title="Labels", description="Kept with the configuration; the worker does not use them."
    )

    @classmethod
    def __get_pydantic_json_schema__(cls, core: CoreSchema, handler: GetJsonSchemaHandler) -> JsonSchemaValue:
        """Return the schema of the form, which refuses values that would break the server's lists of runs."""
        schema = storable(handler(core), handler.resolve_ref_schema)
        # Others are names such as env.NAME. Prefect's own schema would drop `additionalProperties`.
        others = {"propertyNames": {"pattern": TEXT}, "unevaluatedProperties": any_value()}
        handler.resolve_ref_schema(schema).update(others)
        return schema
