"""The end of a flow run's process."""

from __future__ import annotations

from prefect.workers.base import BaseWorkerResult


class GpuMeshResult(BaseWorkerResult):
    """`identifier` is host:pid of the process; `status_code` its exit status, 0 for a run that was cancelled."""
