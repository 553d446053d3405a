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
TAKEN = "Taken by worker"  # how the message of a Pending state begins; Prefect adds others, such as Submitting
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

    async def taken_by(self) -> str:
        """Return what the state says by which a worker took the run last: which worker, and in which attempt."""
        messages = [state.message or "" for state in await self._history() if state.is_pending()]
        return next((message for message in reversed(messages) if message.startswith(TAKEN)), "")

    async def wait(self, message: str, since: datetime) -> None:
        """Show that the run, which is scheduled, waits since when; what a person did meanwhile stays."""
        run = await self.read()
        if run is None or run.state is None or not run.state.is_scheduled() or run.state.message == message:
            return
        await self._set_unless_over(Scheduled(name=WAITING, message=message, scheduled_time=since))

    async def end(self, state: State) -> bool:
        """Set the final `state` and forget what belongs to an attempt; return whether the run had no end before."""
        await self._forget_attempt(0)
        return await self._set_unless_over(state)

    async def crashed(self, message: str) -> bool:
        """Close the run as crashed; return whether the run had no end before."""
        return await self.end(Crashed(message=message))

    async def cancelled(self) -> bool:
        """Close the run as cancelled; return whether the run had no end before."""
        return await self.end(Cancelled(message="Flow run was cancelled; its processes have ended."))

    async def start_again(self, restarts: Restarts, reason: str) -> bool:
        """Schedule the run anew; return whether the server took it, which it does not while a person cancels."""
        await self._forget_attempt(restarts.used)
        return await self._set_unless_over(AwaitingRetry(message=f"restart {restarts}: {reason}"))

    async def put_back(self, message: str) -> None:
        """Let any worker have the run, which never started."""
        await self._set_unless_over(Scheduled(message=message))

    async def can_resume(self, run: FlowRun) -> None:
        """Make a run that is paused below no process one that Resume starts anew."""
        assert run.state is not None
        if not run.state.state_details.pause_reschedule:
            state: State[Any] = Suspended()
            state.state_details = run.state.state_details.model_copy(update={"pause_reschedule": True})
            await self._set_unless_over(state, force=True)
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

    async def _set_unless_over(self, state: State[Any], force: bool = False) -> bool:
        """Set the state of a run that had none of the final ones when it was read; return whether it had none since.

        The server refuses Crashed after an end, but not Cancelled, Failed or Scheduled: then the end is set anew.
        """
        if not await self._set(state, force):
            return False
        before = (await self._history())[-2:-1]
        if before and before[0].is_final():
            await self._set(before[0], force=True)
            return False
        return True

    async def _history(self) -> list[State[Any]]:
        states = await self._ask(lambda: self.client.read_flow_run_states(self.id)) or []
        return sorted(states, key=lambda state: state.timestamp)

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
