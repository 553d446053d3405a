"""The runs that wait for a worker, and what it says if the server gives none."""

import asyncio

import httpx
import pytest

from prefect_rlhf.blocks.worker.waiting_room import WaitingRoom

pytestmark = pytest.mark.quick


@pytest.mark.parametrize(
    ("status", "says"),
    [(500, "cannot list the runs of this pool, so no run starts"), (503, "is unreachable; started runs continue")],
)
def test_a_server_that_lists_no_runs_is_reported_once_with_the_likely_cause(status, says, caplog):
    request = httpx.Request("POST", "http://127.0.0.1/api/work_pools/mesh/get_scheduled_flow_runs")

    async def ask():
        raise httpx.HTTPStatusError("no", request=request, response=httpx.Response(status, request=request))

    room = WaitingRoom(client=None)
    assert [asyncio.run(room.when_reached(ask)) for _ in range(3)] == [[], [], []]
    assert caplog.text.count(says) == 1
