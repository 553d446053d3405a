"""Tell the server that a flow run is over when its worker is dead: what its keeper turns into at the end.

python -m prefect_rlhf.blocks.worker.close_run FLOW_RUN_ID
"""

from __future__ import annotations

import asyncio
import sys
from uuid import UUID

from prefect.client.orchestration import get_client

from prefect_rlhf.blocks.worker.run_records import RunRecords


async def close_run(flow_run_id: UUID) -> None:
    """Close the run as crashed unless it has a final state, and all that it left unfinished."""
    async with get_client() as client:
        await RunRecords(client, flow_run_id).crashed("The worker of this flow run died.")


if __name__ == "__main__":
    asyncio.run(close_run(UUID(sys.argv[1])))
