"""Retries of a flow that returns its failures as states: Prefect itself retries only raised errors."""

from __future__ import annotations

import time

from prefect.client.orchestration import get_client
from prefect.context import FlowRunContext
from prefect.states import Running
from prefect.utilities.engine import propose_state_sync

from prefect_rlhf.placement.errors import MISTAKES, RlhfError
from prefect_rlhf.tasks.failures import failed
from prefect_rlhf.tasks.run_log import run_log


def may_retry(error: RlhfError) -> bool:
    """Whether the current flow run has `retries` left after this error; waits for its `retry_delay_seconds`.

    A mistake is not retried, because a person has to correct it.
    """
    context = FlowRunContext.get()
    if isinstance(error, MISTAKES) or context is None or context.flow_run is None:
        return False
    with get_client(sync_client=True) as client:
        flow_run = client.read_flow_run(context.flow_run.id)
        if flow_run.run_count > (flow_run.empirical_policy.retries or 0):
            return False
        state = propose_state_sync(client, failed(error), flow_run_id=flow_run.id)
        if not state.is_scheduled():
            return False
        retries = flow_run.empirical_policy.retries
        run_log().error("%s: %s; retry %d of %s", type(error).__name__, error, flow_run.run_count, retries)
        if (until := state.state_details.scheduled_time) is not None:
            time.sleep(max(0.0, until.timestamp() - time.time()))
        return propose_state_sync(client, Running(name="Retrying"), flow_run_id=flow_run.id).is_running()
