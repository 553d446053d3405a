"""The server's records of one flow run, as the worker reads and closes them."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable
from datetime import datetime
from typing import TYPE_CHECKING, Any, TypeVar
from uuid import UUID

import anyio
import httpx
from prefect.client.schemas.responses import SetStateStatus
from prefect.exceptions import ObjectNotFound
from prefect.states import AwaitingRetry, Cancelled, Crashed, Scheduled, Suspended

from prefect_rlhf.blocks.worker.open_children import close_children
from prefect_rlhf.blocks.worker.restarts import LABEL, Restarts

if TYPE_CHECKING:
    from prefect.client.orchestration import PrefectClient
    from prefect.client.schemas.objects import FlowRun, State

SERVER_AWAY_SECONDS = 600.0  # what a run leaves is told to a server that comes back within this
ASK_AGAIN_SECONDS = 2.0
WAITING = "WaitingForLease"
T = TypeVar("T")


class RunRecords:
    """States of the flow run `flow_run_id` and of what it started. A server that is away is asked again for minutes."""

    def __init__(self, client: PrefectClient, flow_run_id: UUID) -> None:
        self.client = client
        self.id = flow_run_id

    async def glance(self) -> State | None:
        """Read the state once; None when the server cannot be reached. Raises ObjectNotFound for a deleted run."""
        try:
            return (await self.client.read_flow_run(self.id)).state
        except httpx.HTTPError:
            return None

    async def read(self) -> FlowRun | None:
        """Read the run; None for a deleted one."""
        return await self._ask(lambda: self.client.read_flow_run(self.id))

    async def wait(self, message: str, since: datetime) -> None:
        """Show that the run, which is scheduled, waits since when; what a person did meanwhile stays."""
        run = await self.read()
        if run is None or run.state is None or not run.state.is_scheduled() or run.state.message == message:
            return
        await self._set(Scheduled(name=WAITING, message=message, scheduled_time=since))
        history = await self._ask(lambda: self.client.read_flow_run_states(self.id)) or []
        before = sorted(history, key=lambda state: state.timestamp)[-2:-1]
        if before and before[0].is_cancelled():  # the server lets a cancelled run be scheduled: that is a retry
            await self._set(Cancelled(message=before[0].message), force=True)

    async def end(self, state: State) -> None:
        """Set the final `state`, whatever the run is in, and forget what belongs to an attempt."""
        await self._forget_attempt(0)
        await self._set(state, force=True)

    async def crashed(self, message: str) -> None:
        """Close the run as crashed."""
        await self.end(Crashed(message=message))

    async def cancelled(self) -> None:
        """Close the run as cancelled."""
        await self.end(Cancelled(message="Flow run was cancelled; its processes have ended."))

    async def start_again(self, restarts: Restarts, reason: str) -> bool:
        """Schedule the run anew; return whether the server took it, which it does not while a person cancels."""
        await self._forget_attempt(restarts.used)
        return await self._set(AwaitingRetry(message=f"restart {restarts}: {reason}"))

    async def put_back(self, message: str) -> None:
        """Let any worker have the run, which never started."""
        await self._set(Scheduled(message=message))

    async def can_resume(self, run: FlowRun) -> None:
        """Make a run that is paused below no process one that Resume starts anew."""
        assert run.state is not None
        if not run.state.state_details.pause_reschedule:
            state: State[Any] = Suspended()
            state.state_details = run.state.state_details.model_copy(update={"pause_reschedule": True})
            await self._set(state, force=True)
        await self._forget_attempt(0)

    async def forget_ended(self, run: FlowRun) -> None:
        """Forget the attempt of a run whose state says the rest: it is over, or scheduled for another attempt."""
        if run.state is not None and run.state.is_scheduled() and run.empirical_policy.retry_type == "in_process":
            policy = run.empirical_policy.model_copy(update={"retry_type": "reschedule"})  # that process is gone
            await self._ask(lambda: self.client.update_flow_run(self.id, empirical_policy=policy))
        await self._forget_attempt(0)

    async def close_children(self, message: str) -> None:
        """Cancel the task runs and subflow runs that the run left unfinished: nobody will finish them."""
        await self._ask(lambda: close_children(self.client, [self.id], Cancelled(message=message)))

    async def _forget_attempt(self, restarts: int) -> None:
        """Count the restarts; forget the process, so that the server cancels the run without one."""
        await self._ask(lambda: self.client.update_flow_run_labels(self.id, {LABEL: restarts}))
        gone = {"infrastructure_pid": None}
        await self._ask(lambda: self.client.request("PATCH", "/flow_runs/{id}", path_params={"id": self.id}, json=gone))

    async def _set(self, state: State[Any], force: bool = False) -> bool:
        """Return whether the server took the state."""
        answer = await self._ask(lambda: self.client.set_flow_run_state(self.id, state, force=force))
        return answer is not None and answer.status is SetStateStatus.ACCEPT

    async def _ask(self, question: Callable[[], Awaitable[T]]) -> T | None:
        """Return the server's answer; None when the run is deleted or the server away for too long."""
        give_up = time.monotonic() + SERVER_AWAY_SECONDS
        while True:
            try:
                return await question()
            except ObjectNotFound:
                return None
            except httpx.HTTPError as error:
                refused = isinstance(error, httpx.HTTPStatusError) and error.response.status_code < 500
                if refused or time.monotonic() > give_up:
                    return None
                await anyio.sleep(ASK_AGAIN_SECONDS)
