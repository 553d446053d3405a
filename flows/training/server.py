"""The Prefect server that a run needs: that of the settings, or a temporary one."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from functools import partial

from prefect import get_client
from prefect.settings import PREFECT_SERVER_EPHEMERAL_STARTUP_TIMEOUT_SECONDS as START_LIMIT
from prefect.settings import get_current_settings, temporary_settings

from prefect_rlhf.placement.errors import InvalidInput

NO_TELEMETRY = "PREFECT_SERVER_ANALYTICS_ENABLED"
START_SECONDS = 120
"""Limit of a temporary server's start, where nobody set one: Prefect's 20 are too little on a busy machine."""


def check_server() -> None:
    """Raise InvalidInput where the server of Prefect's settings does not answer, or that of a run without one."""
    url = get_current_settings().api.url
    if not url:  # a temporary server's telemetry locks its database, and finds nobody where there is no network
        os.environ.setdefault(NO_TELEMETRY, "false")
    limit = temporary_settings(set_defaults={START_LIMIT: START_SECONDS})
    error: Exception | None
    try:
        with limit, nullcontext() if url else _processes_beside(), get_client(sync_client=True) as client:
            error = client.api_healthcheck()
    except RuntimeError as raised:  # Prefect's temporary server did not start in time
        error = raised
    if error is not None:
        expected = f"the address of a Prefect server that answers ({error!s:.200})"
        raise InvalidInput("PREFECT_API_URL", url and str(url), expected)


@contextmanager
def _processes_beside() -> Iterator[None]:
    """Start processes in groups of their own, of which Ctrl-C at a terminal ends none.

    Else a run's temporary server would be gone before the run, which has its end to report there.
    """
    popen = subprocess.Popen
    subprocess.Popen = partial(popen, process_group=0)  # type: ignore[misc,assignment]  # Prefect has no setting for it
    try:
        yield
    finally:
        subprocess.Popen = popen  # type: ignore[misc]
