"""The Prefect server that a command needs."""

from __future__ import annotations

from prefect import get_client
from prefect.settings import PREFECT_SERVER_EPHEMERAL_STARTUP_TIMEOUT_SECONDS as START_LIMIT
from prefect.settings import get_current_settings, temporary_settings

from prefect_rlhf.placement.errors import InvalidInput

START_SECONDS = 120
"""Limit of a temporary server's start, where nobody set one: Prefect's 20 are too little on a busy machine."""


def check_server() -> None:
    """Raise InvalidInput where the server of Prefect's settings does not answer, or that of a run without one."""
    url = get_current_settings().api.url
    error: Exception | None
    try:
        with temporary_settings(set_defaults={START_LIMIT: START_SECONDS}), get_client(sync_client=True) as client:
            error = client.api_healthcheck()
    except RuntimeError as raised:  # Prefect's temporary server did not start in time
        error = raised
    if error is not None:
        expected = f"the address of a Prefect server that answers ({error!s:.200})"
        raise InvalidInput("PREFECT_API_URL", url and str(url), expected)
