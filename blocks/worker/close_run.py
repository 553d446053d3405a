"""Reports to the server the end of a run with a dead worker. The run's keeper becomes this process.

python -m prefect_rlhf.blocks.worker.close_run FLOW_RUN_ID STATUS LOCK REASON
"""

import asyncio
import sys
from uuid import UUID

from prefect.client.orchestration import get_client

from prefect_rlhf.blocks.lease_files import remove_locked
from prefect_rlhf.blocks.worker.after_end import settle
from prefect_rlhf.blocks.worker.process_end import ProcessEnd
from prefect_rlhf.blocks.worker.restarts import Restarts
from prefect_rlhf.blocks.worker.run_records import RunRecords


async def close_run(flow_run_id: UUID, end: ProcessEnd) -> None:
    """Start the run again if it may restart; otherwise close it as crashed, unless its state is already right."""
    async with get_client() as client:
        killed_by = "" if end.reason else "The worker of this flow run died."
        await settle(RunRecords(client, flow_run_id), end, Restarts.from_environment(), killed_by)


def main() -> None:
    """Read the arguments. `LOCK` is the descriptor of the run's lock, which delays its next attempt until the end."""
    flow_run_id, status, lock, *reason = sys.argv[1:]
    try:
        asyncio.run(close_run(UUID(flow_run_id), ProcessEnd(int(status), " ".join(reason))))
    finally:
        if lock:
            remove_locked(int(lock))


if __name__ == "__main__":
    main()
