"""The end of a flow run's process."""

from prefect.workers.base import BaseWorkerResult


class GpuMeshResult(BaseWorkerResult):
    """The result of a run: `identifier` is host:pid of its keeper; `status_code` is 0, however the run ended."""
