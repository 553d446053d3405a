"""The Prefect server of a run: the server of the settings, or a temporary server."""

import os
import re
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from httpx import HTTPError, InvalidURL, Timeout
from prefect import get_client
from prefect.client.base import ServerType
from prefect.exceptions import PrefectHTTPStatusError
from prefect.settings import PREFECT_CLIENT_MAX_RETRIES, get_current_settings, temporary_settings
from prefect.settings import PREFECT_SERVER_EPHEMERAL_STARTUP_TIMEOUT_SECONDS as START_LIMIT

from prefect_rlhf.errors.errors import InvalidInput
from prefect_rlhf.files.environment import handed_over, starts_module
from prefect_rlhf.tasks.server.patience import impatient

NO_TELEMETRY = "PREFECT_SERVER_ANALYTICS_ENABLED"
START_SECONDS = 120
"""Default limit for the start of a temporary server: Prefect's 20 s are too short on a busy machine."""
SOON = Timeout(10, connect=2)  # seconds; a connection is tried four times
_LIFELINES: list[int] = []
"""Open ends of pipes: the kernel closes them however this process ends, and the servers that it started end then."""
_ADDRESS = re.compile(r"https?://[^/\s]+(/.*)?/api(/.*)?", re.IGNORECASE)


def check_server() -> None:
    """Raise InvalidInput if Prefect's server does not answer: the server of the settings, or a temporary server."""
    if get_current_settings().api.url:
        check_given_server()
        return
    os.environ.setdefault(NO_TELEMETRY, "false")  # its telemetry locks its database, and fails without a network
    error: Exception | None
    try:
        limit = temporary_settings(set_defaults={START_LIMIT: START_SECONDS})
        with limit, processes_beside(), get_client(sync_client=True) as client:
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


@contextmanager
def processes_beside() -> Iterator[None]:
    """Start processes in process groups of their own, so that Ctrl-C at a terminal does not end them.

    Otherwise a run's temporary server would end before the run, which still has to report its end there. It ends with
    this process, also if that is killed. Tools of plays cannot read the server's variables in `/proc`.
    """
    popen: Any = subprocess.Popen

    def beside(args: Sequence[str], *more: Any, env: Mapping[str, str] | None = None, **words: Any) -> Any:
        if env is None or not starts_module(args):
            return popen(args, *more, env=env, process_group=0, **words)
        lifeline, held = os.pipe()
        try:
            with handed_over(args, env, lifeline) as (command, at_start, hidden):
                started = popen(command, *more, env=at_start, pass_fds=(hidden, lifeline), process_group=0, **words)
        except BaseException:
            os.close(held)
            raise
        finally:
            os.close(lifeline)
        _LIFELINES.append(held)
        return started

    subprocess.Popen = beside  # type: ignore[misc,assignment]  # Prefect has no setting for it
    try:
        yield
    finally:
        subprocess.Popen = popen  # type: ignore[misc]
