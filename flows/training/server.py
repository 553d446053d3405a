"""The Prefect server that a run needs: the server of the settings, or a temporary server."""

import os
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

from prefect import get_client
from prefect.settings import PREFECT_SERVER_EPHEMERAL_STARTUP_TIMEOUT_SECONDS as START_LIMIT
from prefect.settings import get_current_settings, temporary_settings

from prefect_rlhf.errors.errors import InvalidInput
from prefect_rlhf.files.environment import handed_over, starts_module

NO_TELEMETRY = "PREFECT_SERVER_ANALYTICS_ENABLED"
START_SECONDS = 120
"""Default limit for the start of a temporary server: Prefect's 20 s are too short on a busy machine."""


def check_server() -> None:
    """Raise InvalidInput if the server of Prefect's settings, or else a temporary server, does not answer."""
    url = get_current_settings().api.url
    if not url:  # a temporary server's telemetry locks its database, and fails without a network
        os.environ.setdefault(NO_TELEMETRY, "false")
    limit = temporary_settings(set_defaults={START_LIMIT: START_SECONDS})
    error: Exception | None
    try:
        with limit, nullcontext() if url else processes_beside(), get_client(sync_client=True) as client:
            error = client.api_healthcheck()
    except RuntimeError as raised:  # Prefect's temporary server did not start in time
        error = raised
    if error is not None:
        expected = f"the address of a Prefect server that answers ({error!s:.200})"
        raise InvalidInput("PREFECT_API_URL", url and str(url), expected)


@contextmanager
def processes_beside() -> Iterator[None]:
    """Start processes in process groups of their own, so that Ctrl-C at a terminal does not end them.

    Otherwise a run's temporary server would end before the run, which still has to report its end there. Tools of plays
    cannot read the server's variables in `/proc`.
    """
    popen: Any = subprocess.Popen

    def beside(args: Sequence[str], *more: Any, env: Mapping[str, str] | None = None, **words: Any) -> Any:
        if env is None or not starts_module(args):
            return popen(args, *more, env=env, process_group=0, **words)
        with handed_over(args, env) as (command, at_start, hidden):
            return popen(command, *more, env=at_start, pass_fds=(hidden,), process_group=0, **words)

    subprocess.Popen = beside  # type: ignore[misc,assignment]  # Prefect has no setting for it
    try:
        yield
    finally:
        subprocess.Popen = popen  # type: ignore[misc]
