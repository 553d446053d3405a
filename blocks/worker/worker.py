"""The gpu-mesh worker."""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import itertools
import signal
import tempfile
import threading
from collections.abc import AsyncIterator
from pathlib import Path
from typing import TYPE_CHECKING, final

import anyio
import httpx
from prefect.client.schemas.objects import StateType
from prefect.exceptions import Abort, InfrastructureNotFound, ObjectNotFound
from prefect.runner._control_channel import ControlChannel
from prefect.states import Pending
from prefect.utilities.engine import propose_state
from prefect.workers.base import BaseWorker

from prefect_rlhf.blocks.worker.after_end import settle
from prefect_rlhf.blocks.worker.claimed_run import TakenRun
from prefect_rlhf.blocks.worker.configuration import GpuMeshConfiguration, GpuMeshResult
from prefect_rlhf.blocks.worker.flow_process import FlowProcess, signal_keeper
from prefect_rlhf.blocks.worker.keeper import REASON_FILE
from prefect_rlhf.blocks.worker.process_end import REASON_VARIABLE, ProcessEnd, read_reason
from prefect_rlhf.blocks.worker.recover import recover_runs
from prefect_rlhf.blocks.worker.run_records import TAKEN, RunRecords
from prefect_rlhf.blocks.worker.variables import GpuMeshVariables
from prefect_rlhf.blocks.worker.waiting_room import WaitingRoom
from prefect_rlhf.errors.errors import RlhfError
from prefect_rlhf.files.processes.environment import hide

if TYPE_CHECKING:
    from uuid import UUID

    from anyio.abc import TaskStatus
    from prefect.client.schemas.objects import FlowRun, State
    from prefect.client.schemas.responses import WorkerFlowRunResponse

RECOVER_EVERY = 10  # polls
POLL_SECONDS = 1.0  # a cancelled run notices within this, the control channel's second, and the grace
CLOSE_SECONDS = 10.0  # limit for a stopping worker's reports to the server


@final
class GpuMeshWorker(BaseWorker[GpuMeshConfiguration, GpuMeshVariables, GpuMeshResult]):
    """Runs each flow run in its own process, which holds a mesh of devices.

    However the flow run ends (normally, cancelled, killed, or with the worker), no process of it remains and its
    devices are free. A run stays scheduled until its devices are held, so that the end of a worker cannot lose it.
    """

    type = "gpu-mesh"
    job_configuration = GpuMeshConfiguration
    job_configuration_variables = GpuMeshVariables

    _display_name = "GPU mesh"
    _description = "Lease an aligned mesh of devices to each flow run and run it there. Made for RLHF training."
    _documentation_url = "https://docs.prefect.io/v3/concepts/workers"

    _control: ControlChannel
    _waiting: WaitingRoom

    async def setup(self) -> None:
        """Also open the channel that marks a SIGTERM to a flow run's process as a person's cancellation."""
        _restore_interrupt()
        hide()  # plays are below this process, and could read its variables
        self._control = await self._exit_stack.enter_async_context(ControlChannel())  # first in, so last to close
        await super().setup()
        assert self._runs_task_group is not None  # made by the base's setup
        self._taken: dict[UUID, TakenRun] = {}
        self._left_alone: set[UUID] = set()  # uncertain runs that the log has reported
        self._waiting = WaitingRoom(self.client)
        self._polling = anyio.Lock()
        self._runs_task_group.start_soon(self._look_after_runs)

    async def _look_after_runs(self) -> None:
        """Poll as soon as a waiting run can start; recover orphaned runs every RECOVER_EVERY seconds."""
        with anyio.CancelScope() as scope:
            self._scheduled_task_scopes.add(scope)  # cancelled by the base's teardown
            for second in itertools.count():
                with contextlib.suppress(httpx.HTTPError, RlhfError):
                    if second % RECOVER_EVERY == 0 and self._work_pool is not None:
                        await recover_runs(self.client, self.work_pool.name, self._configuration, self._left_alone)
                    if self._waiting.is_worth_a_look():
                        await self.get_and_submit_flow_runs()
                await anyio.sleep(POLL_SECONDS)

    async def _get_scheduled_flow_runs(self) -> list[WorkerFlowRunResponse]:
        """Return an empty list while the server is away: a worker that raised here would end its running flow runs."""
        return await self._waiting.when_reached(super()._get_scheduled_flow_runs)

    async def _submit_scheduled_flow_runs(self, flow_run_response: list[WorkerFlowRunResponse]) -> list[FlowRun]:
        """Submit the runs whose devices are free now, in the order of their scheduled times; the others wait."""
        async with self._polling:
            self._waiting.clear()
            try:
                return [run for entry in flow_run_response for run in await self._submit_if_free(entry)]
            finally:
                self._waiting.forget_absent()

    async def _submit_if_free(self, entry: WorkerFlowRunResponse) -> list[FlowRun]:
        flow_run = entry.flow_run
        if flow_run.id in self._submitting_flow_run_ids or (self._limiter and not self._limiter.available_tokens):
            return []
        logger = self.get_flow_run_logger(flow_run)
        try:
            taken = await self._waiting.take(flow_run, await self._configuration(flow_run), logger)
        except ObjectNotFound:  # the deployment was deleted: the base class cancels the run
            return await super()._submit_scheduled_flow_runs([entry])
        except ValueError as error:  # InvalidInput, or a job variable of a wrong type
            await self._waiting.refuse(flow_run, logger, str(error))
            return []
        except RlhfError as error:  # the lease book is locked by a stopped process
            logger.error(str(error))
            return []
        if taken is None:
            return []
        self._taken[flow_run.id] = taken
        # The labels are set before the Pending state. If the worker is killed between the two, the run is still
        # scheduled; in the other order it would be Pending without an origin, and `recover_runs` would not find it.
        try:
            await self.client.update_flow_run_labels(flow_run.id, taken.leave_origin())
            submitted = await super()._submit_scheduled_flow_runs([entry])
        except BaseException:
            taken.release()
            raise
        if not submitted:
            taken.release()
        return submitted

    async def _configuration(self, flow_run: FlowRun) -> GpuMeshConfiguration:
        """Return the job variables of pool, deployment and run. Raises ValueError for an invalid variable."""
        return await self.job_configuration.resolve_for_flow_run(
            flow_run.model_copy(deep=True),  # the method changes its argument
            client=self.client,
            work_pool=self.work_pool,
            worker_name=self.name,
            worker_id=self.backend_id,
        )

    async def _submit_run(self, flow_run: FlowRun) -> None:
        """Release a taken run that another worker has started, or that was cancelled meanwhile."""
        try:
            await super()._submit_run(flow_run)
        finally:
            if taken := self._taken.pop(flow_run.id, None):
                taken.release()

    async def _propose_pending_state(self, flow_run: FlowRun) -> bool:
        """Claim the run at the server, which accepts one worker. The state names the worker, for `recover_runs`."""
        origin = self._taken[flow_run.id].origin
        pending: State[None] = Pending(message=f"{TAKEN} {self.name} on {origin.host}, attempt {origin.attempt}")
        try:
            state = await propose_state(self.client, pending, flow_run_id=flow_run.id)
        except Abort as abort:
            self.get_flow_run_logger(flow_run).info(f"Another worker has taken this run: {abort}")
            return False
        except httpx.HTTPError as error:
            reason = f"{type(error).__name__}: {error}"
            self.get_flow_run_logger(flow_run).error(f"The worker could not claim the run at the server: {reason}")
            return False
        return state.is_pending()

    async def run(  # type: ignore[override]  # the base stores str() of any value
        self,
        flow_run: FlowRun,
        configuration: GpuMeshConfiguration,
        task_status: TaskStatus[int | str] | None = None,
    ) -> GpuMeshResult:
        """Start and watch the run's process; then kill its last processes, free the devices and settle the state."""
        taken = self._taken.pop(flow_run.id, None)
        if taken is None:
            raise RlhfError("a gpu-mesh worker runs only the flow runs that its pool schedules: use a deployment")
        try:
            lease = taken.lease
            where = f"{lease.mesh.name} of cluster {lease.cluster.name}"
            self.get_flow_run_logger(flow_run).info(
                f"Lease {lease.id}: {where} ({len(lease.devices)} devices, kind: {lease.kind})"
            )
            return await self._run_on(taken, RunRecords(self.client, flow_run.id), task_status)
        finally:
            taken.release()
            self._waiting.look_soon()

    async def _run_on(
        self, taken: TakenRun, records: RunRecords, task_status: TaskStatus[int | str] | None
    ) -> GpuMeshResult:
        restarts = taken.configuration.restarts
        with tempfile.TemporaryDirectory(prefix="gpu-mesh-", ignore_cleanup_errors=True) as folder:
            try:
                async with self._process(taken, records, folder) as process:
                    (task_status or anyio.TASK_STATUS_IGNORED).started(process.identifier)
                    await self._watch(process, records)
            except asyncio.CancelledError:
                with anyio.CancelScope(shield=True), anyio.move_on_after(CLOSE_SECONDS):
                    await settle(records, ProcessEnd(0), restarts, "The worker was stopped.")
                raise
            end = ProcessEnd(process.status, read_reason(Path(folder, REASON_FILE)))
        taken.release_devices()  # no process is left; reports to the server may take minutes and need no devices
        await settle(records, end, restarts)
        # for another status the base class would set Crashed, even if the next attempt already runs
        return GpuMeshResult(identifier=process.identifier, status_code=0)

    @contextlib.asynccontextmanager
    async def _process(self, taken: TakenRun, records: RunRecords, folder: str) -> AsyncIterator[FlowProcess]:
        """Start the flow run's process. After the body, no process of the run remains."""
        configuration = taken.configuration
        port, token = self._control.register(records.id)
        given = {
            "PREFECT__CONTROL_PORT": str(port),
            "PREFECT__CONTROL_TOKEN": token,
            REASON_VARIABLE: str(Path(folder, REASON_FILE)),
        }
        process = await FlowProcess.start(
            configuration.run.id,
            configuration.arguments,
            environment={**configuration.environment(taken.lease), **given},
            working_dir=configuration.working_dir or folder,
            grace_seconds=configuration.grace_seconds,
            devices=taken.devices,
            lock=taken.lock.descriptor,
            folder=folder,
            stream_output=configuration.stream_output,
        )
        try:
            yield process
        finally:
            with anyio.CancelScope(shield=True):
                await process.stop()
            self._control.unregister(records.id)

    async def _watch(self, process: FlowProcess, records: RunRecords) -> None:
        """Return when the process has ended, or must be stopped because a person cancelled or deleted the run.

        A suspended run ends on its own after its current step; its devices are free only then.
        """
        while not await process.ended(POLL_SECONDS):
            try:
                state = await records.glance()
            except ObjectNotFound:
                return
            if state is not None and state.type in (StateType.CANCELLING, StateType.CANCELLED):
                await self._control.signal(records.id, "cancel")
                return

    async def kill_infrastructure(
        self, infrastructure_pid: str, configuration: GpuMeshConfiguration, grace_seconds: int = 30
    ) -> None:
        """Stop the flow run whose keeper is `infrastructure_pid`; it ends by the grace of its own configuration."""
        try:
            signal_keeper(infrastructure_pid, configuration.run.id, signal.SIGTERM)
        except LookupError as error:
            raise InfrastructureNotFound(str(error)) from error


def _restore_interrupt() -> None:
    """Handle SIGINT if this process inherited it as ignored, as from `prefect worker start &` in a script.

    Prefect's worker turns SIGTERM into SIGINT and passes that to the handler it found. With an ignored SIGINT, the
    worker could not be stopped.
    """
    if threading.current_thread() is not threading.main_thread():
        return
    handler = signal.getsignal(signal.SIGINT)
    if inspect.isfunction(handler):
        handler = inspect.getclosurevars(handler).nonlocals.get("original_handler")
    main = asyncio.current_task()
    if handler is signal.SIG_IGN and main is not None:
        asyncio.get_running_loop().add_signal_handler(signal.SIGINT, main.cancel)
