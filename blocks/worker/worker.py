"""The gpu-mesh worker."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import tempfile
import time
from collections.abc import AsyncIterator
from typing import TYPE_CHECKING, final

import anyio
from prefect.exceptions import InfrastructureNotFound
from prefect.runner._control_channel import ControlChannel
from prefect.states import Failed
from prefect.workers.base import BaseWorker

from prefect_rlhf.blocks.lease import LeaseTimeout
from prefect_rlhf.blocks.lease_book import Busy, Holder, LeasedMesh
from prefect_rlhf.blocks.worker.configuration import GpuMeshConfiguration
from prefect_rlhf.blocks.worker.flow_process import FlowProcess, signal_keeper
from prefect_rlhf.blocks.worker.result import GpuMeshResult
from prefect_rlhf.blocks.worker.run_records import RunRecords
from prefect_rlhf.blocks.worker.variables import GpuMeshVariables
from prefect_rlhf.placement.errors import RlhfError
from prefect_rlhf.placement.lease import Lease

if TYPE_CHECKING:
    from anyio.abc import TaskStatus
    from prefect.client.schemas.objects import FlowRun
    from prefect.logging.loggers import PrefectLogAdapter

POLL_SECONDS = 1.0  # a cancelled run notices within this, the control channel's second, and the grace
LOG_LINE_SECONDS = 10.0  # between two equal lines that say what is waited for
CLOSE_SECONDS = 10.0  # a stopping worker tells the server of its runs for at most this long
LATE_EVENTS_SECONDS = 2.0  # a dead process's last task run events reach the server within this


class CancelledWhileWaiting(RlhfError):
    """A run that was cancelled before it had its lease."""


@final
class GpuMeshWorker(BaseWorker[GpuMeshConfiguration, GpuMeshVariables, GpuMeshResult]):
    """Runs each flow run in a process of its own that holds a mesh of devices.

    However the flow run ends (by itself, cancelled, killed, or with the worker), no process of it remains and its
    devices are free.
    """

    type = "gpu-mesh"
    job_configuration = GpuMeshConfiguration
    job_configuration_variables = GpuMeshVariables

    _display_name = "GPU mesh"
    _description = "Lease an aligned mesh of devices to each flow run and run it there. Made for RLHF training."
    _documentation_url = "https://docs.prefect.io/v3/concepts/workers"

    _control: ControlChannel

    async def setup(self) -> None:
        """Also open the channel that tells a flow run's process that a SIGTERM is a person's cancellation."""
        self._control = await self._exit_stack.enter_async_context(ControlChannel())  # first in, so last to close
        await super().setup()

    async def run(  # type: ignore[override]  # the base means what it stores: any value that str() takes
        self,
        flow_run: FlowRun,
        configuration: GpuMeshConfiguration,
        task_status: TaskStatus[int | str] | None = None,
    ) -> GpuMeshResult:
        """Lease, start, watch; then reap, release and close what is left unfinished on the server."""
        started: TaskStatus[int | str] = task_status or anyio.TASK_STATUS_IGNORED
        records = RunRecords(self.client, flow_run.id)
        logger = self.get_flow_run_logger(flow_run)
        try:
            locked = None if configuration.run.dry_run else await self._wait_for_lease(configuration, records, logger)
            lease = _lease(configuration, locked)
        except CancelledWhileWaiting:
            await records.cancelled()
            return _never_started(started)
        except RlhfError as error:
            logger.error(str(error))
            await records.refuse(Failed(message=str(error)))
            return _never_started(started)
        logger.info(
            f"Lease {lease.id}: {lease.mesh.name} of cluster {lease.cluster.name} ({len(lease.devices)} devices)"
        )
        try:
            return await self._run_on(lease, locked, configuration, records, started)
        finally:
            if locked is not None:
                locked.release()

    async def _wait_for_lease(
        self, configuration: GpuMeshConfiguration, records: RunRecords, logger: PrefectLogAdapter
    ) -> LeasedMesh:
        book, holder = configuration.lease_book(), Holder.now(configuration.run.id, configuration.run.name)
        deadline = time.monotonic() + configuration.lease_wait_seconds
        shown, shown_at = "", 0.0
        while isinstance(answer := book.acquire(configuration.wanted, holder), Busy):
            now, words = time.monotonic(), str(answer)
            if now >= deadline:
                raise LeaseTimeout(f"{answer}; gave up after {configuration.lease_wait_seconds:g} s")
            if words != shown:
                await records.show_waiting(words)
            if words != shown or now >= shown_at + LOG_LINE_SECONDS:
                logger.info(words)
                shown, shown_at = words, now
            try:
                await anyio.sleep(POLL_SECONDS)
                if await records.is_cancelled():
                    raise CancelledWhileWaiting
            except asyncio.CancelledError:
                with anyio.CancelScope(shield=True), anyio.move_on_after(POLL_SECONDS):
                    await records.put_back()
                raise
        return answer

    async def _run_on(
        self,
        lease: Lease,
        locked: LeasedMesh | None,
        configuration: GpuMeshConfiguration,
        records: RunRecords,
        started: TaskStatus[int | str],
    ) -> GpuMeshResult:
        try:
            async with self._process(lease, locked, configuration, records) as process:
                started.started(process.identifier)
                cancelled = await self._watch(process, records)
        except asyncio.CancelledError:
            with anyio.CancelScope(shield=True), anyio.move_on_after(CLOSE_SECONDS):
                await records.crashed("The worker was stopped.")
            raise
        if locked is not None:
            locked.release()  # before the server is told: nothing of the run is left
        if cancelled:
            await records.cancelled()
            return GpuMeshResult(identifier=process.identifier, status_code=0)
        assert self._runs_task_group is not None  # set while the worker runs
        self._runs_task_group.start_soon(self._close_children, records)
        return GpuMeshResult(identifier=process.identifier, status_code=process.status)

    @contextlib.asynccontextmanager
    async def _process(
        self, lease: Lease, locked: LeasedMesh | None, configuration: GpuMeshConfiguration, records: RunRecords
    ) -> AsyncIterator[FlowProcess]:
        """Start the flow run's process; when the body is left, nothing of it remains."""
        port, token = self._control.register(records.id)
        control = {"PREFECT__CONTROL_PORT": str(port), "PREFECT__CONTROL_TOKEN": token}
        with tempfile.TemporaryDirectory(prefix="gpu-mesh-") as folder:
            process = await FlowProcess.start(
                configuration.run.id,
                configuration.arguments,
                environment={**configuration.environment(lease), **control},
                working_dir=configuration.working_dir or folder,
                grace_seconds=configuration.grace_seconds,
                descriptors=locked.descriptors if locked else (),
                stream_output=configuration.stream_output,
            )
            try:
                yield process
            finally:
                with anyio.CancelScope(shield=True):
                    await process.stop()
                self._control.unregister(records.id)

    async def _watch(self, process: FlowProcess, records: RunRecords) -> bool:
        """Return when the process ended (False) or a person cancelled the run and the process was told so (True)."""
        while not await process.ended(POLL_SECONDS):
            if await records.is_cancelled():
                await self._control.signal(records.id, "cancel")
                return True
        return await records.is_cancelled()

    async def _close_children(self, records: RunRecords) -> None:
        """Leave no task run Pending or Running under a run that did not complete."""
        await anyio.sleep(LATE_EVENTS_SECONDS)
        state = await records.state()
        if state is not None and state.is_final() and not state.is_completed():
            await records.close_children("The flow run ended before this.")

    async def kill_infrastructure(
        self, infrastructure_pid: str, configuration: GpuMeshConfiguration, grace_seconds: int = 30
    ) -> None:
        """Stop the flow run whose keeper is `infrastructure_pid`; it ends by the grace of its own configuration."""
        try:
            signal_keeper(infrastructure_pid, signal.SIGTERM)
        except LookupError as error:
            raise InfrastructureNotFound(str(error)) from error


def _lease(configuration: GpuMeshConfiguration, locked: LeasedMesh | None) -> Lease:
    """Return the lease of `locked`; of a dry run, of the mesh that it would get. Raises InvalidInput without any."""
    if locked is not None:
        return configuration.lease(locked.id, locked.mesh)
    return configuration.lease("dry-run", configuration.lease_book().candidates(configuration.wanted)[0])


def _never_started(started: TaskStatus[int | str]) -> GpuMeshResult:
    """Return the result of a run that was cancelled while it waited, or refused."""
    started.started("none")
    return GpuMeshResult(identifier="none", status_code=0)
