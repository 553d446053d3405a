"""Prefect's own clients against a server that is away, comes back, or stays away."""

import socket
import threading
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer

import httpx
import pytest
from prefect.client.base import PrefectHttpxAsyncClient, PrefectHttpxSyncClient

from prefect_rlhf.errors.errors import InvalidInput
from prefect_rlhf.tasks.server import patience
from prefect_rlhf.tasks.server.patience import VARIABLE, ServerAway, hurry, not_waiting, wait_for_server

pytestmark = pytest.mark.quick


class Answers(BaseHTTPRequestHandler):
    """Says it is a proxy without a server behind it, once, then answers."""

    refusals = 1

    def do_GET(self):
        self.server.asked += 1
        self.send_response(502 if self.server.asked <= self.refusals else 200)
        self.end_headers()

    def log_message(self, *_):
        pass


@pytest.fixture
def port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


@contextmanager
def served(port, after):
    """A server that is there some seconds from now."""
    servers = []

    def serve():
        server = HTTPServer(("127.0.0.1", port), Answers)
        server.asked = 0
        servers.append(server)
        server.serve_forever()

    timer = threading.Timer(after, serve)
    timer.start()
    try:
        yield
    finally:
        timer.join(0.1)
        for server in servers:
            server.shutdown()
            server.server_close()
        timer.join()


@pytest.fixture
def limit(monkeypatch):
    """Set how long a run waits."""
    monkeypatch.setattr(patience, "RETRY_SECONDS", 0.1)
    monkeypatch.setattr(patience, "HURRY_SECONDS", 0.5)
    monkeypatch.setattr(patience.PATIENCE, "_away", False)

    def set_limit(seconds):
        monkeypatch.setenv(VARIABLE, str(seconds))
        wait_for_server()

    yield set_limit
    set_limit(patience.DEFAULT_SECONDS)


def test_a_client_that_never_connected_waits_for_a_server_that_comes_back(port, limit):
    """Prefect's own client gives up at once here; the 502 of a proxy is waited out too."""
    limit(30)
    with served(port, after=0.5), PrefectHttpxSyncClient(base_url=f"http://127.0.0.1:{port}") as client:
        assert client.get("/anything").status_code == 200


async def ask(port):
    async with PrefectHttpxAsyncClient(base_url=f"http://127.0.0.1:{port}") as client:
        return (await client.get("/anything")).status_code


def test_an_asynchronous_client_waits_for_a_server_too(port, limit):
    import asyncio

    limit(30)
    with served(port, after=0.5):
        assert asyncio.run(ask(port)) == 200


def test_a_server_that_stays_away_is_named_with_the_limit_and_its_setting(port, limit):
    limit(0.5)
    with (
        PrefectHttpxSyncClient(base_url=f"http://127.0.0.1:{port}/api") as client,
        pytest.raises(ServerAway, match=rf"127\.0\.0\.1:{port}/api.* waits 0\.5 s for it \({VARIABLE}\)"),
    ):
        client.get("/anything")


@pytest.mark.parametrize("how", [not_waiting, hurry])
def test_a_request_that_may_not_wait_fails_soon(port, limit, how):
    """A picture that is published again later, and a run that is stopped by hand: the limit would outlast the test."""
    limit(3600)
    with PrefectHttpxSyncClient(base_url=f"http://127.0.0.1:{port}") as client:
        context = how()
        if context is None:
            with pytest.raises(ServerAway):
                client.get("/anything")
        else:
            with context, pytest.raises(ServerAway):
                client.get("/anything")


def test_other_errors_than_outages_are_not_retried(limit):
    limit(3600)
    with PrefectHttpxSyncClient(base_url="nonsense://127.0.0.1") as client, pytest.raises(httpx.UnsupportedProtocol):
        client.get("/anything")


@pytest.mark.parametrize("given", ["soon", "-1", "nan", "inf"])
def test_a_limit_that_is_not_in_seconds_is_refused(given, monkeypatch):
    monkeypatch.setenv(VARIABLE, given)
    with pytest.raises(InvalidInput, match=f"{VARIABLE}: got '{given}', expected seconds, 0 or more"):
        wait_for_server()
