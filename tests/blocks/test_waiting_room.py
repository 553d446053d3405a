"""The runs that wait for a worker, and what it says if the server gives none."""

import asyncio
from datetime import UTC, datetime, timedelta
from logging import getLogger
from types import SimpleNamespace
from uuid import uuid4

import httpx
import pytest
from prefect.client.schemas.responses import SetStateStatus
from prefect.states import Scheduled

from prefect_rlhf.blocks.lease_book import Busy
from prefect_rlhf.blocks.worker.configuration import GpuMeshConfiguration
from prefect_rlhf.blocks.worker.run_records import WAITING
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


class Server:
    """A server with a single run in `state`, and the messages that the worker set."""

    def __init__(self, state):
        self.state, self.messages = state, []

    async def read_flow_run(self, _):
        return SimpleNamespace(state=self.state)

    async def read_flow_run_states(self, _):
        return []

    async def set_flow_run_state(self, _, state, force=False):
        self.messages.append(state.message)
        return SimpleNamespace(status=SetStateStatus.ACCEPT)


@pytest.mark.parametrize(("name", "seconds", "told"), [("Late", 1, 1), (WAITING, 1, 0), (WAITING, 60, 1)])
def test_a_run_says_at_once_that_it_waits_and_names_new_holders_at_most_every_ten_seconds(name, seconds, told):
    """A hundred runs that wait would else cost the server a hundred messages for each run that ends."""
    then = datetime.now(UTC) - timedelta(seconds=seconds)
    server = Server(Scheduled(name=name, message="held by another", scheduled_time=then))
    server.state.timestamp = then
    room = WaitingRoom(client=server)
    configuration = GpuMeshConfiguration(command="", env={})
    busy = Busy("1 device", "desk", ("grpo/tidy-owl",))
    asyncio.run(room._wait(SimpleNamespace(id=uuid4()), configuration, busy, getLogger("test")))
    assert server.messages == [str(busy)] * told
