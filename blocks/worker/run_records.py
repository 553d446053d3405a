"""The server's records of a flow run and its child runs, as the worker reads and closes them."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable
from datetime import datetime
from typing import TYPE_CHECKING, Any, TypeVar
from uuid import UUID

import anyio
import httpx
from prefect.client.schemas.filters import (
    FlowRunFilter,
    FlowRunFilterId,
    FlowRunFilterParentFlowRunId,
    TaskRunFilter,
    TaskRunFilterState,
    TaskRunFilterStateType,
)
from prefect.client.schemas.objects import FlowRun, State, StateType
from prefect.client.schemas.responses import SetStateStatus
from prefect.client.schemas.sorting import FlowRunSort
from prefect.exceptions import ObjectNotFound
from prefect.states import AwaitingRetry, Cancelled, Scheduled, Suspended

from prefect_rlhf.blocks.worker.restarts import LABEL, Restarts

if TYPE_CHECKING:
    from prefect.client.orchestration import PrefectClient
    from prefect.client.schemas.objects import FlowRun, State


SERVER_AWAY_SECONDS = 600.0  # requests about a run's end repeat this long while the server is away
ASK_AGAIN_SECONDS = 2.0
WAITING = "WaitingForLease"
TAKEN = "Taken by worker"  # how the message of a Pending state begins; Prefect adds others, such as Submitting
T = TypeVar("T")


OPEN_STATES = [StateType.SCHEDULED, StateType.PENDING, StateType.RUNNING, StateType.PAUSED, StateType.CANCELLING]
OPEN_TASKS = TaskRunFilter(state=TaskRunFilterState(type=TaskRunFilterStateType(any_=OPEN_STATES), name=None))
PAGE = 200  # the server's largest page


async def close_children(client: PrefectClient, flow_run_ids: list[UUID], state: State[Any]) -> None:
    """Set all open child runs to the final `state`, also below subflow runs that are already final."""
    await _close_tasks(client, flow_run_ids, state)
    offset = 0
    while page := await _subflow_runs(client, flow_run_ids, offset):
        await close_children(client, [run.id for run in page], state)
        for run in page:
            if run.state is None or not run.state.is_final():
                await client.set_flow_run_state(run.id, state, force=True)
        offset += len(page)


async def _close_tasks(client: PrefectClient, flow_run_ids: list[UUID], state: State[Any]) -> None:
    runs = FlowRunFilter(id=FlowRunFilterId(any_=flow_run_ids))
    closed: set[UUID] = set()
    while tasks := await client.read_task_runs(flow_run_filter=runs, task_run_filter=OPEN_TASKS, limit=PAGE):
        left = [task.id for task in tasks if task.id not in closed]
        if not left:
            return  # the server still lists tasks that were closed above: do not loop
        for task in left:
            await client.set_task_run_state(task, state, force=True)
            closed.add(task)


async def _subflow_runs(client: PrefectClient, flow_run_ids: list[UUID], offset: int) -> list[FlowRun]:
    parents = FlowRunFilter(parent_flow_run_id=FlowRunFilterParentFlowRunId(any_=flow_run_ids))
    return await client.read_flow_runs(flow_run_filter=parents, sort=FlowRunSort.ID_DESC, limit=PAGE, offset=offset)


class RunRecords:
    """States of the flow run `flow_run_id` and of its children. If the server is away, requests are retried for
    minutes.
    """

    def __init__(self, client: PrefectClient, flow_run_id: UUID) -> None:
        self.client = client
        self.id = flow_run_id

    async def glance(self) -> State | None:
        """Read the state once; None if the server cannot be reached. Raises ObjectNotFound for a deleted run."""
        try:
            return (await self.client.read_flow_run(self.id)).state
        except httpx.HTTPError:
            return None

    async def read(self) -> FlowRun | None:
        """Read the run; None if it was deleted or the server is away for too long."""
        return await self._ask(lambda: self.client.read_flow_run(self.id))

    async def taken_by(self) -> str:
        """Return the message of the last Pending state that a worker set. It names the worker and the attempt."""
        messages = [state.message or "" for state in await self._history() if state.is_pending()]
        return next((message for message in reversed(messages) if message.startswith(TAKEN)), "")

    async def wait(self, message: str, since: datetime) -> None:
        """Show in a scheduled run's state that it waits, and since when; keep a state that a person set meanwhile."""
        run = await self.read()
        if run is None or run.state is None or not run.state.is_scheduled() or run.state.message == message:
            return
        await self._set_unless_over(Scheduled(name=WAITING, message=message, scheduled_time=since))

    async def end(self, state: State) -> bool:
        """Set the final `state` and clear the attempt's data; return whether the run had no final state before."""
        await self._forget_attempt(0)
        return await self._set_unless_over(state)

    async def start_again(self, restarts: Restarts, reason: str) -> bool:
        """Schedule the run again; return whether the server accepted that, which it refuses during a cancellation."""
        await self._forget_attempt(restarts.used)
        return await self._set_unless_over(AwaitingRetry(message=f"restart {restarts}: {reason}"))

    async def put_back(self, message: str) -> None:
        """Offer a run that never started to every worker of its pool again."""
        await self._set_unless_over(Scheduled(message=message))

    async def can_resume(self, run: FlowRun) -> None:
        """Let `Resume` start a paused run in a new process, because its own process has ended."""
        assert run.state is not None
        if not run.state.state_details.pause_reschedule:
            state: State[Any] = Suspended()
            state.state_details = run.state.state_details.model_copy(update={"pause_reschedule": True})
            await self._set_unless_over(state, force=True)
        await self._forget_attempt(0)

    async def forget_ended(self, run: FlowRun) -> None:
        """Clear the attempt's data of a run whose state is already right: final, or scheduled for another attempt."""
        if run.state is not None and run.state.is_scheduled() and run.empirical_policy.retry_type == "in_process":
            policy = run.empirical_policy.model_copy(update={"retry_type": "reschedule"})  # that process is gone
            await self._ask(lambda: self.client.update_flow_run(self.id, empirical_policy=policy))
        await self._forget_attempt(0)

    async def close_children(self, message: str) -> None:
        """Cancel the run's unfinished task runs and subflow runs, because no process will finish them."""
        await self._ask(lambda: close_children(self.client, [self.id], Cancelled(message=message)))

    async def _forget_attempt(self, restarts: int) -> None:
        """Store the count of restarts and clear the pid, so that the server can cancel a run without a process."""
        await self._ask(lambda: self.client.update_flow_run_labels(self.id, {LABEL: restarts}))
        gone = {"infrastructure_pid": None}
        await self._ask(lambda: self.client.request("PATCH", "/flow_runs/{id}", path_params={"id": self.id}, json=gone))

    async def _set_unless_over(self, state: State[Any], force: bool = False) -> bool:
        """Set the state of a run that was not final when it was read; return whether it was still not final.

        The server refuses Crashed after a final state, but accepts Cancelled, Failed and Scheduled. After those, the
        earlier final state is restored.
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
        """Set the state; return whether the server accepted it."""
        answer = await self._ask(lambda: self.client.set_flow_run_state(self.id, state, force=force))
        return answer is not None and answer.status is SetStateStatus.ACCEPT

    async def _ask(self, question: Callable[[], Awaitable[T]]) -> T | None:
        """Return the server's answer; None if the run is deleted, the server refuses, or it is away for too long."""
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
