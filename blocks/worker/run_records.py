"""The server's records of one flow run, as the worker reads and closes them. An unreachable server changes nothing."""

from __future__ import annotations

from typing import TYPE_CHECKING
from uuid import UUID

import httpx
from prefect.client.schemas.filters import (
    FlowRunFilter,
    FlowRunFilterId,
    FlowRunFilterParentTaskRunId,
    TaskRunFilter,
    TaskRunFilterState,
    TaskRunFilterStateType,
)
from prefect.client.schemas.objects import FlowRun, State, StateType
from prefect.exceptions import Abort, ObjectNotFound
from prefect.states import Cancelled, Crashed, Pending, Scheduled
from prefect.utilities.engine import propose_state

if TYPE_CHECKING:
    from prefect.client.orchestration import PrefectClient

OPEN_STATES = [StateType.SCHEDULED, StateType.PENDING, StateType.RUNNING, StateType.PAUSED, StateType.CANCELLING]
PAGE = 200
WAITING = "WaitingForLease"


class RunRecords:
    """States of the flow run `flow_run_id` and of what it started."""

    def __init__(self, client: PrefectClient, flow_run_id: UUID) -> None:
        self.client = client
        self.id = flow_run_id

    async def state(self) -> State | None:
        """Read the state; None when the server cannot be reached or knows no such run."""
        try:
            return (await self.client.read_flow_run(self.id)).state
        except (httpx.HTTPError, ObjectNotFound):
            return None

    async def is_cancelled(self) -> bool:
        """Return whether a person asked to cancel the run, or it is cancelled already."""
        state = await self.state()
        return state is not None and state.type in (StateType.CANCELLING, StateType.CANCELLED)

    async def show_waiting(self, message: str) -> None:
        """Show what the run waits for as its state. Cancelled runs keep their state."""
        try:
            if (state := await self.state()) is not None and state.name == WAITING:
                # The server takes Pending after Pending only under another name.
                await propose_state(self.client, Pending(name="InfrastructurePending"), flow_run_id=self.id)
            await propose_state(self.client, Pending(name=WAITING, message=message), flow_run_id=self.id)
        except (Abort, httpx.HTTPError):
            return

    async def put_back(self) -> None:
        """Let another worker have the run, which waited in vain here."""
        state = await self.state()
        if state is not None and state.is_pending():
            await self._set(Scheduled(message="The worker that waited for its lease was stopped."))

    async def refuse(self, state: State) -> None:
        """Set the final `state` of a run that was not started."""
        await self._set(state)

    async def cancelled(self) -> None:
        """Close the run and all that it started as cancelled."""
        await self._set(Cancelled(message="Flow run was cancelled; its processes have ended."))
        await self.close_children("The flow run was cancelled.")

    async def crashed(self, message: str) -> None:
        """Close the run as crashed unless it has a final state, and all that it left unfinished."""
        state = await self.state()
        if state is not None and not state.is_final():
            await self._set(Crashed(message=message))
        await self.close_children(message)

    async def close_children(self, message: str) -> None:
        """Cancel the task runs and subflow runs that the run left unfinished: nobody will finish them."""
        try:
            await self._close(self.id, Cancelled(message=message))
        except (httpx.HTTPError, ObjectNotFound):
            return

    async def _set(self, state: State) -> None:
        try:
            await self.client.set_flow_run_state(self.id, state, force=True)
        except (httpx.HTTPError, ObjectNotFound):
            return

    async def _close(self, flow_run_id: UUID, state: State) -> None:
        open_tasks = TaskRunFilter(state=TaskRunFilterState(type=TaskRunFilterStateType(any_=OPEN_STATES), name=None))
        run = FlowRunFilter(id=FlowRunFilterId(any_=[flow_run_id]))
        while tasks := await self.client.read_task_runs(flow_run_filter=run, task_run_filter=open_tasks, limit=PAGE):
            for child in await self._children([task.id for task in tasks]):
                await self._close(child.id, state)
                await self.client.set_flow_run_state(child.id, state, force=True)
            for task in tasks:
                await self.client.set_task_run_state(task.id, state, force=True)

    async def _children(self, task_run_ids: list[UUID]) -> list[FlowRun]:
        parents = FlowRunFilter(parent_task_run_id=FlowRunFilterParentTaskRunId(any_=task_run_ids))
        runs = await self.client.read_flow_runs(flow_run_filter=parents)
        return [run for run in runs if run.state is None or not run.state.is_final()]
