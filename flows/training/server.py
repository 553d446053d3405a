"""The Prefect server of a run: the server of the settings, or a temporary server."""

import logging
import os
import re
import subprocess
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import copy_context
from types import SimpleNamespace
from typing import Any

from httpx import HTTPError, InvalidURL, Timeout
from prefect import get_client
from prefect.client.base import ServerType
from prefect.exceptions import PrefectHTTPStatusError
from prefect.settings import PREFECT_CLIENT_MAX_RETRIES, get_current_settings, temporary_settings
from prefect.settings import PREFECT_SERVER_EPHEMERAL_STARTUP_TIMEOUT_SECONDS as START_LIMIT

from prefect_rlhf.errors.errors import InvalidInput
from prefect_rlhf.files.processes.environment import handed_over, starts_module
from prefect_rlhf.files.processes.lifeline import ending_with
from prefect_rlhf.tasks.server.patience import impatient

NO_TELEMETRY = "PREFECT_SERVER_ANALYTICS_ENABLED"
START_SECONDS = 120
"""Default limit for the start of a temporary server: Prefect's 20 s are too short on a busy machine."""
SOON = Timeout(10, connect=2)  # seconds; a connection is tried four times
_ADDRESS = re.compile(r"https?://[^/\s]+(/.*)?/api(/.*)?", re.IGNORECASE)


@contextmanager
def server_beside() -> Iterator[Callable[[], None]]:
    """Start a temporary server while the body prepares the run, which takes as long. Yields `check_server`, preceded by
    the wait for that start.

    A start that failed is made again by the check, which says why. If the body raises, the start is given up.
    """
    if get_current_settings().api.url:
        yield check_server
        return
    from prefect.server.api.server import SubprocessASGIServer  # takes a second, so before the thread

    server = SubprocessASGIServer()

    def start() -> None:
        try:
            with _as_a_run_starts_it():
                server.start(START_LIMIT.value())
        except Exception as error:  # noqa: BLE001  Prefect's errors, and those of sockets and processes
            logging.getLogger(__name__).debug("the server did not start beside the checks: %s", error)

    starting = threading.Thread(target=copy_context().run, args=(start,), daemon=True, name="server")
    starting.start()

    def wait() -> None:
        starting.join()
        check_server()

    try:
        yield wait
    except BaseException:
        while starting.is_alive():  # Python cannot end safely beside a thread
            server.stop()
            starting.join(0.1)
        raise


@contextmanager
def _as_a_run_starts_it() -> Iterator[None]:
    from prefect.server.api import server

    os.environ.setdefault(NO_TELEMETRY, "false")  # its telemetry locks its database, and fails without a network
    # Prefect has no setting for it. Only its own module sees this: others import and start processes meanwhile.
    module: Any = server
    module.subprocess = SimpleNamespace(**vars(subprocess) | {"Popen": started_beside})
    try:
        with temporary_settings(set_defaults={START_LIMIT: START_SECONDS}):
            yield
    finally:
        module.subprocess = subprocess


def check_server() -> None:
    """Raise InvalidInput if Prefect's server does not answer: the server of the settings, or a temporary server."""
    if get_current_settings().api.url:
        check_given_server()
        return
    error: Exception | None
    try:
        with _as_a_run_starts_it(), get_client(sync_client=True) as client:
            error = client.api_healthcheck()
    except RuntimeError as raised:  # Prefect's temporary server did not start in time
        error = raised
    if error is not None:
        expected = f"a temporary server that starts ({error!s:.200}), or the address of a Prefect server"
        raise InvalidInput("PREFECT_API_URL", None, expected)


def check_given_server() -> None:
    """Raise InvalidInput if the settings name a server that does not answer soon, or that is not Prefect's. Starts no
    server.
    """
    if not (url := get_current_settings().api.url):
        return
    status = None
    try:
        once = temporary_settings({PREFECT_CLIENT_MAX_RETRIES: 0})
        with once, impatient(), get_client({"timeout": SOON}, True) as client:
            client.request("GET", "/health").json()
            if client.server_type is ServerType.SERVER:  # unlike the other, this one needs the password
                client.request("GET", "/admin/version").json()
        return
    except PrefectHTTPStatusError as error:
        status = error.response.status_code
        answer = f"status {status}"
    except ValueError:
        answer = "it answers with a page instead of JSON"
    except (HTTPError, InvalidURL, OSError, RuntimeError) as error:
        answer = str(error) or type(error).__name__
    expected = f"the address of a Prefect server that answers ({answer:.200}); {_remedy(str(url), status)}"
    raise InvalidInput("PREFECT_API_URL", str(url), expected)


def _remedy(url: str, status: int | None) -> str:
    """Say what to do about the answer from the server at `url`."""
    if status in (401, 403):
        return "set PREFECT_API_AUTH_STRING, or PREFECT_API_KEY for Prefect Cloud, to what the server expects"
    if not _ADDRESS.fullmatch(url):
        return "write it as http://HOST:4200/api"
    unset = "unset PREFECT_API_URL" if os.environ.get("PREFECT_API_URL") else "`prefect config unset PREFECT_API_URL`"
    return f"start it with `prefect server start`, or {unset} for a temporary server"


def started_beside(args: Sequence[str], *more: Any, env: Mapping[str, str] | None = None, **words: Any) -> Any:
    """Start a process as `subprocess.Popen` does, in a process group of its own, so that Ctrl-C at a terminal does not
    end it.

    Otherwise a run's temporary server would end before the run, which still has to report its end there. A module of
    Python ends with this process, even if that is killed, and tools of plays cannot read its variables in `/proc`.
    """
    popen: Any = subprocess.Popen  # its stubs have a form for each mix of words
    if env is None or not starts_module(args):
        return popen(args, *more, env=env, process_group=0, **words)
    lifeline, _ = os.pipe()  # the end for writing stays open as long as this process lives
    try:
        with handed_over(ending_with(lifeline, args), env) as (command, at_start, hidden):
            passed = (hidden, lifeline)
            return popen(command, *more, env=at_start, pass_fds=passed, process_group=0, **words)
    finally:
        os.close(lifeline)
