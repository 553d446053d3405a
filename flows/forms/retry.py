"""Retries of a flow that returns its failures as states: Prefect itself retries only raised errors."""

import os
import time

from prefect.client.orchestration import get_client
from prefect.context import FlowRunContext
from prefect.states import Running
from prefect.utilities.engine import propose_state_sync

from prefect_rlhf.blocks.worker.restarts import Restarts
from prefect_rlhf.errors.errors import MISTAKES, RlhfError
from prefect_rlhf.tasks.run_log import run_log
from prefect_rlhf.tasks.server.failures import OF_A_WORKER, failed


def may_retry(error: RlhfError) -> bool:
    """Whether the current flow run has `retries` left after this error; waits for its `retry_delay_seconds`.

    A mistake is not retried, because a person has to correct it. The restarts of a worker come first, because they
    can replace a lost node.
    """
    context = FlowRunContext.get()
    if context is None or context.flow_run is None:
        return False
    flow_run_id, policy = context.flow_run.id, context.flow_run.empirical_policy
    retries = policy.retries or 0
    if retries == 0:
        return False
    with get_client(sync_client=True) as client:
        if isinstance(error, MISTAKES):  # the server would reject the state Failed while `retries` are left
            client.update_flow_run(flow_run_id, empirical_policy=policy.model_copy(update={"retries": None}))
            return False
        run_count = client.read_flow_run(flow_run_id).run_count
        of_worker = str(flow_run_id) == os.environ.get(OF_A_WORKER)
        if run_count > retries or (of_worker and Restarts.from_environment().are_left):
            return False
        state = propose_state_sync(client, failed(error), flow_run_id=flow_run_id)
        if not state.is_scheduled():
            return False
        run_log().error("%s: %s; retry %d of %s", type(error).__name__, error, run_count, retries)
        if (until := state.state_details.scheduled_time) is not None:
            time.sleep(max(0.0, until.timestamp() - time.time()))
        return propose_state_sync(client, Running(name="Retrying"), flow_run_id=flow_run_id).is_running()
