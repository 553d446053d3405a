"""Flow runs that wait for devices. The server keeps them scheduled, so that any worker of their pool may claim them."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING

import httpx
from prefect.exceptions import ObjectNotFound
from prefect.logging.loggers import get_logger
from prefect.states import Failed

from prefect_rlhf.blocks.lease import LeaseTimeout
from prefect_rlhf.blocks.lease_book import Busy
from prefect_rlhf.blocks.lease_queue import FIRST
from prefect_rlhf.blocks.worker.claimed_run import TakenRun, can_be_taken
from prefect_rlhf.blocks.worker.run_records import WAITING, RunRecords
from prefect_rlhf.errors.errors import RlhfError

if TYPE_CHECKING:
    from prefect.client.orchestration import PrefectClient
    from prefect.client.schemas.objects import FlowRun
    from prefect.client.schemas.responses import WorkerFlowRunResponse
    from prefect.logging.loggers import PrefectLogAdapter

    from prefect_rlhf.blocks.lease_files import FileLock
    from prefect_rlhf.blocks.worker.configuration import GpuMeshConfiguration


CANNOT_LIST = 500
MESSAGE_SECONDS = 10.0
"""A waiting run names new holders at most this often: each message costs requests, and many runs may wait."""
BROKEN_LIST = (
    "The Prefect server cannot list the runs of this pool, so no run starts. A run with half a surrogate pair in its "
    "parameters or tags, or with a number of 2^64, is a cause: delete that run"
)


class WaitingRoom:
    """Runs that were offered to a worker but cannot start yet, and when to check them again."""

    def __init__(self, client: PrefectClient) -> None:
        self.client = client
        self._waiting: list[tuple[GpuMeshConfiguration, datetime]] = []  # each with the end of its longest wait
        self._places: dict[str, FileLock] = {}  # locked tickets of runs in the queue of their lease book
        self._look_soon = False
        self._server_away = False

    def clear(self) -> None:
        """Forget all runs, because the server is about to list the scheduled runs."""
        self._waiting, self._look_soon = [], False

    def forget_absent(self) -> None:
        """Release the queue places of runs that no longer wait, because the server has not listed them since
        `clear`.
        """
        waiting = {configuration.run.id for configuration, _ in self._waiting}
        for run_id in self._places.keys() - waiting:
            self._places.pop(run_id).release()

    def look_soon(self) -> None:
        """Note that a run has ended, so that another waiting run, or this run again, may start."""
        self._look_soon = True

    def is_worth_a_look(self) -> bool:
        """Return whether a waiting run can start now or has waited for too long."""
        now = datetime.now(UTC)
        try:
            return self._look_soon or any(now >= until or can_be_taken(run) for run, until in self._waiting)
        except RlhfError:
            return True  # the attempt to take the run will report the error

    async def when_reached(
        self, ask: Callable[[], Awaitable[list[WorkerFlowRunResponse]]]
    ) -> list[WorkerFlowRunResponse]:
        """Return the server's answer; an empty list while the server is unreachable, which the log reports once."""
        try:
            answer = await ask()
        except httpx.HTTPError as error:
            if isinstance(error, httpx.HTTPStatusError) and error.response.status_code < 500:
                raise
            if not self._server_away:
                reason = f"{type(error).__name__}: {error}"
                is_broken = isinstance(error, httpx.HTTPStatusError) and error.response.status_code == CANNOT_LIST
                what = BROKEN_LIST if is_broken else "The Prefect server is unreachable; started runs continue"
                get_logger("workers").warning(f"{what} ({reason}).")
            self._server_away = True
            return []
        self._server_away = False
        return answer

    async def take(
        self, flow_run: FlowRun, configuration: GpuMeshConfiguration, logger: PrefectLogAdapter
    ) -> TakenRun | None:
        """Claim a scheduled run and its devices; None if it has to wait, which its state then shows.

        Raises InvalidInput for devices that its cluster does not have.
        """
        taken = TakenRun.take(configuration)
        if taken is None:  # another worker starts it, or its last attempt has not ended yet
            self._waiting.append((configuration, datetime.max.replace(tzinfo=UTC)))
            return None
        try:
            if configuration.run.id not in self._places:
                start = flow_run.next_scheduled_start_time
                arrived = min(start.timestamp(), time.time()) if start else None
                place = taken.enter_queue(arrived, await self._priority(flow_run))
                self._places.update({configuration.run.id: place} if place else {})
            busy = taken.take_devices()
            if busy is None:
                configuration.lease_book().queue.leave(configuration.run.id)
                return taken
            await self._wait(flow_run, configuration, busy, logger)
        except BaseException:
            taken.release()
            raise
        taken.release()
        return None

    async def _priority(self, flow_run: FlowRun) -> int:
        """Return the priority of the run's work queue; that of a default queue, if the queue was deleted meanwhile."""
        if flow_run.work_queue_id is None:
            return FIRST
        try:
            return (await self.client.read_work_queue(flow_run.work_queue_id)).priority or FIRST
        except ObjectNotFound:
            return FIRST

    async def _wait(
        self, flow_run: FlowRun, configuration: GpuMeshConfiguration, busy: Busy, logger: PrefectLogAdapter
    ) -> None:
        """Show in the run's state why and since when it waits, or fail the run after its longest wait."""
        records = RunRecords(self.client, flow_run.id)
        now, message, run = datetime.now(UTC), str(busy), await records.read()
        state = run.state if run is not None else None  # the runs of a poll come without states
        waits = state is not None and state.name == WAITING
        since = state.state_details.scheduled_time if state is not None and waits else None
        until = (since or now) + timedelta(seconds=configuration.lease_wait_seconds)
        if now >= until:
            error = LeaseTimeout(f"{busy}; gave up after {configuration.lease_wait_seconds:g} s")
            await self.refuse(flow_run, logger, str(error))
            return
        is_known = state is not None and waits and state.message == message
        is_new = state is not None and waits and (now - state.timestamp).total_seconds() < MESSAGE_SECONDS
        if not is_known and not is_new:
            logger.info(message)
            await records.wait(message, since or now)
        self._waiting.append((configuration, until))

    async def refuse(self, flow_run: FlowRun, logger: PrefectLogAdapter, message: str) -> None:
        """Fail a run that cannot start, in one line."""
        line = " ".join(message.split())
        logger.error(line)
        await RunRecords(self.client, flow_run.id).end(Failed(message=line))
