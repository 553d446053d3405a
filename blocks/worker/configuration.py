"""The configuration of one flow run: the form's values, the run's own values, and the resulting environment."""

from __future__ import annotations

import os
import shlex
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any
from uuid import UUID

from prefect.utilities.processutils import get_sys_executable
from prefect.workers.base import BaseJobConfiguration, BaseWorkerResult
from pydantic import PrivateAttr, ValidationError

from prefect_rlhf.blocks.lease_book import LeaseBook
from prefect_rlhf.blocks.worker.restarts import ENVIRONMENT_VARIABLE as RESTARTS_VARIABLE
from prefect_rlhf.blocks.worker.restarts import Restarts, restarts_of
from prefect_rlhf.blocks.worker.variables import MeshFields
from prefect_rlhf.errors.errors import InvalidInput, SeveralMistakes
from prefect_rlhf.errors.right_value import right_value
from prefect_rlhf.files.gpus import VISIBLE, only_gpus
from prefect_rlhf.placement.devices.lease import ENVIRONMENT_VARIABLE, Lease
from prefect_rlhf.placement.devices.mesh import DeviceMesh

if TYPE_CHECKING:
    from prefect.client.orchestration import PrefectClient
    from prefect.client.schemas.objects import Flow, FlowRun, WorkPool
    from prefect.client.schemas.responses import DeploymentResponse
    from pydantic_core import ErrorDetails


RLHF_FLOW = "rlhf"
"""The name of every flow of this package, and of every algorithm that `rlhf_flow` makes."""
DEVICES_VARIABLE = "GPU_MESH_DEVICES"


@dataclass(frozen=True, slots=True)
class RunFacts:
    """What the worker needs to know about a flow run."""

    id: str = ""
    name: str = ""
    pool: str = ""
    dry_run: bool = False
    restarts: int = 0
    trains: bool = True
    """Whether it is one of this package's flows, whose ranks need an aligned mesh and engines for its devices."""


class GpuMeshConfiguration(MeshFields, BaseJobConfiguration):
    """The mesh that a flow run leases, and the process that runs it."""

    _run: RunFacts = PrivateAttr(RunFacts())

    @property
    def run(self) -> RunFacts:
        """Facts of the flow run, set by `prepare_for_flow_run`."""
        return self._run

    @property
    def wanted(self) -> str | int:
        """The mesh to lease by name, or by number of devices."""
        return self.mesh or self.num_devices or self.shape.whole.num_devices

    @classmethod
    async def from_template_and_values(
        cls, base_job_template: dict[str, Any], values: dict[str, Any], client: PrefectClient | None = None
    ) -> GpuMeshConfiguration:
        """Refuse wrong values, and job variables that the work pool's form lacks, which Prefect would ignore."""
        fields = base_job_template["variables"].get("properties", {})
        for name in values:
            if name.partition(".")[0] not in fields:
                raise InvalidInput("job_variables", name, f"one of {', '.join(sorted(fields))}")
        try:
            configuration = await super().from_template_and_values(base_job_template, values, client=client)
        except ValidationError as error:
            raise SeveralMistakes.of([_wrong(mistake) for mistake in error.errors()]) from error
        assert isinstance(configuration, cls)
        return configuration

    def prepare_for_flow_run(
        self,
        flow_run: FlowRun,
        deployment: DeploymentResponse | None = None,
        flow: Flow | None = None,
        work_pool: WorkPool | None = None,
        worker_name: str | None = None,
        worker_id: UUID | None = None,
    ) -> None:
        """Copy the facts that the process needs from the flow run and its pool."""
        trains = flow is None or flow.name == RLHF_FLOW
        taken_away = {name for name, value in self.env.items() if value is None}
        super().prepare_for_flow_run(flow_run, deployment, flow, work_pool, worker_name, worker_id=worker_id)
        self._run = RunFacts(
            id=str(flow_run.id),
            name=f"{deployment.name if deployment else 'run'}/{flow_run.name}",
            pool=work_pool.name if work_pool else "",
            dry_run=trains and flow_run.parameters.get("dry_run") is True,
            restarts=restarts_of(flow_run),
            trains=trains,
        )
        self.env = {name: value for name, value in {**os.environ, **self.env}.items() if name not in taken_away}

    @property
    def arguments(self) -> list[str]:
        """The command; `python` as its first word means this worker's interpreter."""
        words = shlex.split(self.command or self._base_flow_run_command())
        return [get_sys_executable() if word == "python" else word for word in words[:1]] + words[1:]

    @property
    def has_own_engines(self) -> bool:
        """Whether the flow runs the engines of this worker's interpreter; another interpreter may have other
        engines.
        """
        return self.run.trains and self.arguments[0] == get_sys_executable()

    def lease_book(self) -> LeaseBook:
        """Return the book of leases on the cluster's devices; only training needs an aligned mesh."""
        return LeaseBook(Path(self.lease_directory), self.shape, any_number=not self.run.trains)

    @property
    def restarts(self) -> Restarts:
        """How many automatic restarts the run has used, and how many are allowed."""
        return Restarts(self.run.restarts, self.max_restarts)

    def environment(self, lease: Lease) -> dict[str, str]:
        """Return the process's environment: the worker's, the form's, and the lease.

        Raises InvalidInput if the worker sees fewer GPUs than the lease has.
        """
        environment = {name: value for name, value in self.env.items() if value is not None}
        given = {RESTARTS_VARIABLE: self.restarts.to_text(), ENVIRONMENT_VARIABLE: lease.to_json()}
        return {**environment, **self._devices(lease), **given}

    def _devices(self, lease: Lease) -> dict[str, str]:
        """Return the variables that name the leased devices, and show the process its own GPUs alone.

        On Ray the ranks get their GPUs from Ray, so the process of a training run keeps its worker's variables.
        """
        if lease.cluster.through_ray:
            return {} if self.run.trains and self.kind == "cuda" else {VISIBLE: ""}
        numbers = [device.index for device in lease.devices]
        named = {DEVICES_VARIABLE: ",".join(map(str, numbers))}
        return named | (only_gpus(numbers, self.env.get(VISIBLE)) if lease.shows_only_its_gpus else {VISIBLE: ""})

    def lease(self, lease_id: str, mesh: DeviceMesh) -> Lease:
        """Return the lease of `mesh`, as the process sees it."""
        devices = () if self.run.dry_run else mesh.devices()
        shown = self.kind == "cuda" and bool(devices) and not self.shape.through_ray
        return Lease(self.run.pool, lease_id, self.shape, mesh, devices, self.kind, self.min_devices, shown)

    @staticmethod
    def _base_flow_run_command() -> str:
        """Return the command of an attempt, which loads and runs the flow as Prefect's engine does."""
        return "python -m prefect_rlhf.blocks.worker.attempt"


class GpuMeshResult(BaseWorkerResult):
    """A run's result: `identifier` is host:pid of its keeper; `status_code` is 0, however the run ended."""


def _wrong(mistake: ErrorDetails) -> InvalidInput:
    """Return the mistake in a job variable. A null is no way to ask for the default."""
    field = ".".join(map(str, ("job_variables", *mistake["loc"])))
    remedy = "; for the pool's value leave it out" if mistake["input"] is None else ""
    return InvalidInput(field, mistake["input"], right_value(mistake) + remedy)
