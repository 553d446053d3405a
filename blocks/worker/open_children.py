"""Task runs and subflow runs that are still open below a run whose process has ended."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any
from uuid import UUID

from prefect.client.schemas.filters import (
    FlowRunFilter,
    FlowRunFilterId,
    FlowRunFilterParentFlowRunId,
    TaskRunFilter,
    TaskRunFilterState,
    TaskRunFilterStateType,
)
from prefect.client.schemas.objects import FlowRun, State, StateType
from prefect.client.schemas.sorting import FlowRunSort

if TYPE_CHECKING:
    from prefect.client.orchestration import PrefectClient

OPEN_STATES = [StateType.SCHEDULED, StateType.PENDING, StateType.RUNNING, StateType.PAUSED, StateType.CANCELLING]
OPEN_TASKS = TaskRunFilter(state=TaskRunFilterState(type=TaskRunFilterStateType(any_=OPEN_STATES), name=None))
PAGE = 200  # the server's largest page


async def close_children(client: PrefectClient, flow_run_ids: list[UUID], state: State[Any]) -> None:
    """Set all open runs below the flow runs to the final `state`, also below subflow runs that are already final."""
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
