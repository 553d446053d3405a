"""The one Prefect server of a process that runs tests. To start one takes as long as a small training run."""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import copy_context
from pathlib import Path
from tempfile import mkdtemp
from unittest.mock import patch

from prefect.events.worker import EventsWorker
from prefect.logging.handlers import APILogWorker
from prefect.settings import PREFECT_API_URL, temporary_settings
from prefect.testing.utilities import prefect_test_harness

from tests.support.migrated_database import put_database


@contextmanager
def own_server() -> Iterator[str]:
    """Start a server with a database of its own. Yield its URL; outside of `runs_go_to` no run is sent there."""
    context, harness = copy_context(), prefect_test_harness(server_startup_timeout=120)
    with patch("prefect.testing.utilities.mkdtemp", _folder_with_database):
        context.run(harness.__enter__)  # its settings stay in that context
    try:
        yield context.run(PREFECT_API_URL.value)
    finally:
        context.run(harness.__exit__, None, None, None)


def _folder_with_database() -> str:
    """Make the folder of the harness, where it would make a database and migrate it."""
    folder = mkdtemp()
    put_database(Path(folder), "prefect-test.db")
    return folder


@contextmanager
def runs_go_to(url: str) -> Iterator[None]:
    """Send flow and task runs of the body to a server, and wait until it has their logs and events."""
    with temporary_settings({PREFECT_API_URL: url}):
        yield
        for worker in APILogWorker, EventsWorker:  # else they would go on sending to this server
            worker.drain_all()
