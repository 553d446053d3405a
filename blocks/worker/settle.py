"""What becomes of a flow run whose process has ended: ended for good, started again, or left to whom it waits for."""

from __future__ import annotations

import anyio
from prefect.client.schemas.objects import StateType

from prefect_rlhf.blocks.worker.process_end import MISTAKE, ProcessEnd
from prefect_rlhf.blocks.worker.restarts import Restarts
from prefect_rlhf.blocks.worker.run_records import RunRecords

LATE_EVENTS_SECONDS = 2.0  # a dead process's last task run events reach the server within this
CHANGES = 3  # a person may change the state while it is settled, this often


async def settle(records: RunRecords, end: ProcessEnd, restarts: Restarts, killed_by: str = "") -> None:
    """Give a run that has no process left the state that is true, and leave nothing open below it.

    A state that is final, or scheduled, or paused, says the truth already: the run itself set it, or a person. Only a
    run that still seems to run is started again, or crashed. `killed_by` says why its process was ended, if it was.
    """
    completed = False
    for _ in range(CHANGES):
        run = await records.read()
        if run is None or run.state is None:
            return
        completed, settled = run.state.is_completed(), True
        if run.state.type is StateType.CANCELLING:
            settled = await records.cancelled()
        elif run.state.type is StateType.PAUSED:
            await records.can_resume(run)
        elif not (run.state.is_running() or run.state.is_pending()):
            await records.forget_ended(run)
        elif end.status == MISTAKE or not restarts.are_left:
            settled = await records.crashed(killed_by or f"The flow run crashed: {end}.")
        else:
            settled = await records.start_again(restarts.next, killed_by or str(end))
        if settled:
            break
    await anyio.sleep(LATE_EVENTS_SECONDS)
    if not completed:
        await records.close_children("The flow run's process ended before this.")
