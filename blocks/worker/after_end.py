"""Decides a flow run's state after its process has ended: closed, scheduled again, or left as it is."""

import anyio
from prefect.client.schemas.objects import StateType
from prefect.states import Cancelled, Crashed

from prefect_rlhf.blocks.worker.process_end import MISTAKE, ProcessEnd
from prefect_rlhf.blocks.worker.restarts import Restarts
from prefect_rlhf.blocks.worker.run_records import RunRecords

LATE_EVENTS_SECONDS = 2.0  # a dead process's last task run events reach the server within this
CHANGES = 3  # how often `settle` starts over after a person changed the state meanwhile


async def settle(records: RunRecords, end: ProcessEnd, restarts: Restarts, killed_by: str = "") -> None:
    """Correct the state of a run that has no process left, and close its children unless it completed.

    A final, scheduled or paused state is already right, because the run itself or a person set it. A run that is still
    Pending or Running is started again or closed as crashed; a run in cancellation is closed as cancelled. `killed_by`
    is the reason if the run's process was killed.
    """
    completed = False
    for _ in range(CHANGES):
        run = await records.read()
        if run is None or run.state is None:
            return
        completed, settled = run.state.is_completed(), True
        if run.state.type is StateType.CANCELLING:
            settled = await records.end(Cancelled(message="Flow run was cancelled; its processes have ended."))
        elif run.state.type is StateType.PAUSED:
            await records.can_resume(run)
        elif not (run.state.is_running() or run.state.is_pending()):
            await records.forget_ended(run)
        elif end.status == MISTAKE or not restarts.are_left:
            settled = await records.end(Crashed(message=killed_by or f"The flow run crashed: {end}."))
        else:
            settled = await records.start_again(restarts.next, killed_by or str(end))
        if settled:
            break
    await anyio.sleep(LATE_EVENTS_SECONDS)
    if not completed:
        await records.close_children("The flow run's process ended before this.")
