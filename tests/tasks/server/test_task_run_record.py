"""A real server that loses ends of task runs has them when the run is over, with their own times."""

from datetime import timedelta
from uuid import uuid4

import pytest
from prefect import flow, task
from prefect.client.orchestration import get_client
from prefect.client.schemas.filters import FlowRunFilter, FlowRunFilterId
from prefect.events.clients import PrefectEventsClient
from prefect.events.schemas.events import Event, RelatedResource, Resource

from prefect_rlhf.tasks.server import task_run_record
from prefect_rlhf.tasks.server.task_run_record import complete_record

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("prefect")]


@task(task_run_name="node {number}")
def node(number):
    return number


def stray_end():
    """The event of the end of a task run that no server knows."""
    flow_run = {"prefect.resource.id": f"prefect.flow-run.{uuid4()}", "prefect.resource.role": "flow-run"}
    return Event(
        event="prefect.task-run.Completed",
        resource=Resource({"prefect.resource.id": f"prefect.task-run.{uuid4()}"}),
        related=[RelatedResource(flow_run)],
        payload={"validated_state": {"type": "COMPLETED"}},
    )


@flow
def three():
    with complete_record():
        for number in range(3):
            node(number)


@pytest.mark.parametrize("lost", [{"node 1"}, {"node 0", "node 1", "node 2"}], ids=["one", "all"])
def test_ends_that_a_server_lost_are_sent_again(lost, monkeypatch):
    """Lost after the client sent them, as by a server that is killed before it writes."""
    task_run_record.record_task_runs()
    for _ in range(300):  # ends that no server will write, as of task runs outside of a run
        task_run_record._record.note(stray_end())
    noting, sent = PrefectEventsClient._emit.__wrapped__, {}

    async def losing(self, event):
        if event.event == "prefect.task-run.Completed" and event.resource.name in lost:
            sent[event.resource.name] = event.occurred
        else:
            await noting(self, event)

    monkeypatch.setattr(task_run_record, "STILL_SECONDS", 1.0)
    monkeypatch.setattr(task_run_record, "TIMES_AGAIN", 20)  # a busy server writes late
    cell = next(cell for cell in PrefectEventsClient._emit.__closure__ if cell.cell_contents is noting)
    cell.cell_contents = losing
    try:
        state = three(return_state=True)
    finally:
        cell.cell_contents = noting
    assert state.is_completed() and set(sent) == lost
    of_run = FlowRunFilter(id=FlowRunFilterId(any_=[state.state_details.flow_run_id]))
    with get_client(sync_client=True) as client:
        runs = {run.name: run for run in client.read_task_runs(flow_run_filter=of_run)}
    assert {name: run.state_name for name, run in runs.items()} == {f"node {n}": "Completed" for n in range(3)}
    for name, occurred in sent.items():
        assert abs(runs[name].end_time - occurred) < timedelta(milliseconds=1)
        assert runs[name].start_time < runs[name].end_time
    assert not task_run_record._record.ends()
