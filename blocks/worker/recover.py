"""Recovers orphaned runs, after worker and keeper were killed together or the machine went down."""

from __future__ import annotations

import socket
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING
from uuid import UUID

from prefect.client.schemas.filters import (
    FlowRunFilter,
    FlowRunFilterState,
    FlowRunFilterStateType,
    WorkPoolFilter,
    WorkPoolFilterName,
)
from prefect.client.schemas.objects import StateType
from prefect.exceptions import ObjectNotFound
from prefect.logging.loggers import get_logger

from prefect_rlhf.blocks.worker import keeper
from prefect_rlhf.blocks.worker.after_end import settle
from prefect_rlhf.blocks.worker.claimed_run import TakenRun
from prefect_rlhf.blocks.worker.flow_process import signal_keeper
from prefect_rlhf.blocks.worker.origin import Origin, why_uncertain
from prefect_rlhf.blocks.worker.process_end import ProcessEnd
from prefect_rlhf.blocks.worker.run_records import RunRecords

if TYPE_CHECKING:
    from prefect.client.orchestration import PrefectClient
    from prefect.client.schemas.objects import FlowRun

    from prefect_rlhf.blocks.worker.configuration import GpuMeshConfiguration

TAKEN_STATES = [StateType.PENDING, StateType.RUNNING, StateType.CANCELLING]
MOST = 200  # runs of a pool that seem to run at the same time
EXISTS = 0  # signal 0 only checks that the process exists


async def recover_runs(
    client: PrefectClient,
    pool: str,
    configure: Callable[[FlowRun], Awaitable[GpuMeshConfiguration]],
    left_alone: set[UUID],
) -> None:
    """Settle the runs of `pool` that this host had claimed and that have neither worker nor process.

    If that is uncertain, the run stays as it is. The log reports each such run once; `left_alone` records them.
    """
    states = FlowRunFilterState(type=FlowRunFilterStateType(any_=TAKEN_STATES), name=None)
    runs = await client.read_flow_runs(
        work_pool_filter=WorkPoolFilter(name=WorkPoolFilterName(any_=[pool])),
        flow_run_filter=FlowRunFilter(state=states),
        limit=MOST,
    )
    for run in runs:
        if Origin.of(run.labels).host == socket.gethostname() and not _has_a_keeper(run):
            try:
                configuration = await configure(run)
            except (ObjectNotFound, ValueError):
                continue  # its deployment or pool was changed meanwhile, so its configuration is unknown
            uncertain = await _recover(RunRecords(client, run.id), configuration)
            if uncertain and run.id not in left_alone:
                remedy = "if it is lost, choose `Change state` on its page, then `Retry`"
                get_logger("workers").info(f"Flow run {run.name} is left alone: {uncertain}; {remedy}.")
                left_alone.add(run.id)


def _has_a_keeper(run: FlowRun) -> bool:
    try:
        signal_keeper(run.infrastructure_pid or "", str(run.id), EXISTS)
    except LookupError:
        return False
    except PermissionError:
        return True  # the keeper of another user's worker
    return True


async def _recover(records: RunRecords, configuration: GpuMeshConfiguration) -> str:
    """Settle the run unless its lock is held, by a worker that runs it or that is reporting its end.

    Returns the reason if it is uncertain that the run is lost; the run then stays as it is.
    """
    taken = TakenRun.take(configuration)
    if taken is None:
        return ""
    try:
        run = await records.read()  # again: no worker can take it while this process holds the lock
        if run is None or run.state is None or run.state.type not in TAKEN_STATES:
            return ""
        origin = Origin.of(run.labels)
        if uncertain := why_uncertain(origin, taken.lock):
            return uncertain
        if not (await records.taken_by()).endswith(origin.attempt):
            return "two workers took it at the same time"
        keeper.reap(configuration.run.id)
        if run.state.is_pending():
            await records.put_back("The worker that took this run was killed before it could start the run.")
        else:
            await settle(records, ProcessEnd(0), configuration.restarts, "The worker of this flow run died.")
        return ""
    finally:
        taken.release()
