"""Failures of a flow run with `retries` left: which of them run the flow again in its process, and which end it."""

from collections.abc import Callable

import pytest
from prefect.client.orchestration import get_client
from prefect.context import FlowRunContext
from prefect.states import Completed

from prefect_rlhf.blocks.worker.restarts import ENVIRONMENT_VARIABLE as RESTARTS_VARIABLE
from prefect_rlhf.errors.errors import InvalidInput, RankLost, RlhfError
from prefect_rlhf.flows.forms.form_flow import FormFlow, form_entry
from prefect_rlhf.flows.forms.options import RunOptions
from prefect_rlhf.tasks.server.failures import OF_A_WORKER

pytestmark = pytest.mark.usefixtures("prefect")
LOST = RankLost("rank 1 was killed")


def states(error: RlhfError, failures: int, begin: Callable[[], None] = lambda: None) -> str:
    """Run a flow with a single retry that fails a number of times; return the names of its states since it began."""
    attempts = []

    def run(_):
        begin()
        attempts.append(FlowRunContext.get().flow_run.id)
        if len(attempts) <= failures:
            raise error
        return Completed()

    flow = FormFlow(form_entry(states, RunOptions, run), name="fails", retries=1)
    flow(steps=1, plan="flattening", return_state=True)
    with get_client(sync_client=True) as client:
        history = client.read_flow_run_states(attempts[0])
    return " ".join(state.name for state in sorted(history, key=lambda state: state.timestamp)[1:])


@pytest.mark.parametrize(("failures", "end"), [(1, "Completed"), (2, "Failed")])
def test_a_failure_is_retried_in_the_same_process(failures, end):
    assert states(LOST, failures) == f"Running AwaitingRetry Retrying {end}"


def test_a_mistake_ends_the_run_although_a_retry_is_left():
    assert states(InvalidInput("steps", 0, "at least 1"), 1) == "Running Failed"


@pytest.mark.parametrize(("restarts", "in_process"), [("0/1", False), ("1/1", True)])
def test_the_restarts_of_a_worker_come_before_the_retries_of_its_flow(monkeypatch, restarts, in_process):
    def begin():
        monkeypatch.setenv(OF_A_WORKER, str(FlowRunContext.get().flow_run.id))
        monkeypatch.setenv(RESTARTS_VARIABLE, restarts)

    assert ("Retrying" in states(LOST, 1, begin)) is in_process
