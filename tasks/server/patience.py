"""Patience with an unreachable Prefect server: requests are retried until it answers, up to a time limit.

Prefect's client retries a refused connection only if the same client was connected before, but a run often opens new
clients, for a group of steps or an artifact. It also doubles the pause between tries, so a server may be back for
minutes before it gets a request. Here the process, not the client, remembers that the server was reachable, and it
retries every second.
"""

import os
import threading
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import wraps
from typing import Any

import anyio
import httpx
from prefect.client.base import PrefectHttpxAsyncClient, PrefectHttpxSyncClient

from prefect_rlhf.errors.errors import InvalidInput, RlhfError

VARIABLE = "PREFECT_RLHF_SERVER_PATIENCE_SECONDS"
DEFAULT_SECONDS = 600.0
RETRY_SECONDS = 1.0
HURRY_SECONDS = 10.0  # enough for a briefly locked database
SAME_OUTAGE_SECONDS = 65.0  # a frozen server fails a request only after Prefect's time-out of 60 s
AWAY_ERRORS = (httpx.TimeoutException, httpx.NetworkError, httpx.RemoteProtocolError)
AWAY_CODES = frozenset({502, 503, 504})  # from a proxy without a server behind it, or for a locked database

_may_wait: ContextVar[bool] = ContextVar("rlhf_may_wait", default=True)
_is_patient: ContextVar[bool] = ContextVar("rlhf_is_patient", default=True)


class ServerAway(RlhfError):
    """The Prefect server did not answer within the time that a run waits for it."""


class Patience:
    """How long the server has been away, over all requests of this process. Thread-safe."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self._lock = threading.Lock()
        self._away_since = self._last_failure = 0.0
        self._away = False

    def answered(self) -> None:
        """Record that the server answered."""
        self._away = False

    def failed(self, asked_at: float, address: str, why: object) -> None:
        """Record another failure of a request that was first tried at `asked_at` (monotonic seconds).

        Raises ServerAway when the time limit is reached, and at once for a request that may not wait.
        """
        now = time.monotonic()
        with self._lock:
            if not self._away or now - self._last_failure > SAME_OUTAGE_SECONDS:
                self._away, self._away_since = True, now
            self._last_failure = now
            waited = now - min(self._away_since, asked_at)
        if waited >= self.seconds or not _may_wait.get():
            raise ServerAway(
                f"the Prefect server at {address} has not answered for {waited:.0f} s ({why}); "
                f"a run waits {self.seconds:g} s for it ({VARIABLE})"
            )

    def spare(self, address: str) -> None:
        """Raise ServerAway for a request that may not wait, if the server is already known to be unreachable."""
        if self._away and not _may_wait.get() and time.monotonic() - self._last_failure < SAME_OUTAGE_SECONDS:
            raise ServerAway(f"the Prefect server at {address} does not answer")


PATIENCE = Patience(DEFAULT_SECONDS)
"""The patience of this process: Prefect creates clients in many places, and all of them share it."""


def wait_for_server() -> None:
    """Make every Prefect request of this process retry while the server is unreachable, from now on.

    Call it after the server has answered once: a wrong address is then refused at once. The environment variable
    `VARIABLE` sets the limit. Raises InvalidInput if its value is not a number of seconds.
    """
    PATIENCE.seconds = _patience_seconds()
    make_clients_patient()


def make_clients_patient() -> None:
    """Make every Prefect request of this process retry while the server is unreachable. Idempotent."""
    _make_patient(PrefectHttpxSyncClient, _sync_send)
    _make_patient(PrefectHttpxAsyncClient, _async_send)


def hurry() -> None:
    """Wait only a few more seconds from now on, for an interactive stop while the server is away."""
    PATIENCE.seconds = min(PATIENCE.seconds, HURRY_SECONDS)


@contextmanager
def not_waiting() -> Iterator[None]:
    """Make requests of the body fail with ServerAway at once instead of waiting."""
    token = _may_wait.set(False)
    try:
        yield
    finally:
        _may_wait.reset(token)


@contextmanager
def impatient() -> Iterator[None]:
    """Send each request of the body only once, to get the server's own answer, even after an earlier run of this
    process.
    """
    token = _is_patient.set(False)
    try:
        yield
    finally:
        _is_patient.reset(token)


def _patience_seconds() -> float:
    given = os.environ.get(VARIABLE, str(DEFAULT_SECONDS))
    try:
        seconds = float(given)
    except ValueError:
        seconds = -1.0
    if not 0.0 <= seconds <= threading.TIMEOUT_MAX:
        raise InvalidInput(VARIABLE, given, "seconds, 0 or more")
    return seconds


def _make_patient(client: type[Any], patient: Callable[[str, Any], Any]) -> None:
    """Wrap the method that sends each request of a client; Prefect's own retries stay outside of the wrapper."""
    send_with_retry = client._send_with_retry
    if hasattr(send_with_retry, "__wrapped__"):
        return  # an earlier run of this process wrapped it

    @wraps(send_with_retry)
    def wrapper(self: Any, request: Any, send: Any, *args: Any, **kwargs: Any) -> Any:
        sent = patient(str(self.base_url).rstrip("/"), send) if _is_patient.get() else send
        return send_with_retry(self, request, sent, *args, **kwargs)

    client._send_with_retry = wrapper


def _is_answer(response: httpx.Response, asked_at: float, address: str) -> bool:
    """Whether the server itself answered; the result is recorded. Raises ServerAway after the time limit."""
    if response.status_code not in AWAY_CODES:
        PATIENCE.answered()
        return True
    PATIENCE.failed(asked_at, address, f"status {response.status_code}")
    return False


def _sync_send(address: str, send: Callable[..., httpx.Response]) -> Callable[..., httpx.Response]:
    def patient_send(*args: Any, **kwargs: Any) -> httpx.Response:
        asked_at = time.monotonic()
        PATIENCE.spare(address)
        while True:
            try:
                response = send(*args, **kwargs)
            except AWAY_ERRORS as error:
                PATIENCE.failed(asked_at, address, type(error).__name__)
            else:
                if _is_answer(response, asked_at, address):
                    return response
            time.sleep(RETRY_SECONDS)

    return patient_send


def _async_send(
    address: str, send: Callable[..., Awaitable[httpx.Response]]
) -> Callable[..., Awaitable[httpx.Response]]:
    async def patient_send(*args: Any, **kwargs: Any) -> httpx.Response:
        asked_at = time.monotonic()
        PATIENCE.spare(address)
        while True:
            try:
                response = await send(*args, **kwargs)
            except AWAY_ERRORS as error:
                PATIENCE.failed(asked_at, address, type(error).__name__)
            else:
                if _is_answer(response, asked_at, address):
                    return response
            await anyio.sleep(RETRY_SECONDS)

    return patient_send
