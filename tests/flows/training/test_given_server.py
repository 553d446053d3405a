"""A server that does not answer, or is no Prefect server, is refused soon, in a line that says what to do."""

import socket
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from threading import Thread

import pytest
from httpx import Timeout
from prefect.settings import PREFECT_API_URL, temporary_settings

from prefect_rlhf.errors.errors import InvalidInput
from prefect_rlhf.flows.training import server
from prefect_rlhf.tasks.server.patience import make_clients_patient

pytestmark = pytest.mark.quick

START = "start it with `prefect server start`, or "


class Answers(BaseHTTPRequestHandler):
    """Answers as some servers do, by the first folder of the address."""

    asked: list[str] = []

    def do_GET(self) -> None:
        """Answer with the status and text of the address."""
        kind = self.path.split("/")[1]
        self.asked.append(self.path)
        is_health = self.path.endswith("/health")
        status = {"none": 404, "busy": 503, "locked": 200 if is_health else 401}.get(kind, 200)
        text = b"<html></html>" if kind == "page" else b"true"
        self.send_response(status)
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text)

    def log_message(self, *words: object) -> None:
        """Print nothing."""


@pytest.fixture(scope="module", autouse=True)
def an_earlier_run() -> None:
    """In the same process, which waited for its own server: that is not how a given server is asked."""
    make_clients_patient()


@pytest.fixture(scope="module")
def address() -> Iterator[str]:
    """The address of a server on this machine."""
    with HTTPServer(("127.0.0.1", 0), Answers) as listening:
        Thread(target=listening.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{listening.server_port}"
        listening.shutdown()


def refusal(url: str) -> str:
    """The line about a server."""
    with temporary_settings({PREFECT_API_URL: url}), pytest.raises(InvalidInput) as refused:
        server.check_given_server()
    return str(refused.value)


@contextmanager
def silent() -> Iterator[str]:
    """The address of a server that takes connections and never answers."""
    with socket.create_server(("127.0.0.1", 0)) as listening:
        yield f"http://127.0.0.1:{listening.getsockname()[1]}/api"


@pytest.mark.parametrize(
    ("path", "said"),
    [
        ("/none/api", f"(status 404); {START}"),
        ("/none", "(status 404); write it as http://HOST:4200/api"),
        ("/busy/api", f"(status 503); {START}"),
        ("/page", "(it answers with a page instead of JSON); write it as http://HOST:4200/api"),
        ("/locked/api", "(status 401); set PREFECT_API_AUTH_STRING, or PREFECT_API_KEY for Prefect Cloud"),
    ],
)
def test_an_address_of_something_else_is_refused_with_what_to_do(address, path, said):
    assert said in refusal(address + path)


@pytest.mark.parametrize("url", ["localhost:4200", "127.0.0.1:4200/api", "http://127.0.0.1:9"])
def test_an_address_without_its_parts_is_shown_whole(url):
    line = refusal(url)
    assert line.startswith(f"PREFECT_API_URL: got {url!r}") and line.endswith("write it as http://HOST:4200/api")


def test_a_stopped_server_is_named_with_the_ways_to_go_on(monkeypatch):
    monkeypatch.setenv("PREFECT_API_URL", "http://127.0.0.1:9/api")
    line = refusal("http://127.0.0.1:9/api")
    assert f"Connection refused); {START}unset PREFECT_API_URL for a temporary server" in line
    monkeypatch.delenv("PREFECT_API_URL")
    assert f"{START}`prefect config unset PREFECT_API_URL` for a temporary" in refusal("http://127.0.0.1:9/api")


def test_a_server_that_never_answers_is_waited_for_once(monkeypatch):
    monkeypatch.setattr(server, "SOON", Timeout(0.2))
    with silent() as url:
        assert "(timed out)" in refusal(url)


def test_a_server_that_fails_is_asked_once(address):
    Answers.asked.clear()
    refusal(address + "/busy/api")
    assert Answers.asked == ["/busy/api/health"]


def test_a_server_that_answers_is_taken(address):
    with temporary_settings({PREFECT_API_URL: f"{address}/api"}):
        server.check_given_server()
