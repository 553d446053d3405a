"""The one Prefect server of a process that runs tests. To start one takes as long as a small training run."""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import copy_context

from prefect.events.worker import EventsWorker
from prefect.logging.handlers import APILogWorker
from prefect.settings import PREFECT_API_URL, temporary_settings
from prefect.testing.utilities import prefect_test_harness


@contextmanager
def own_server() -> Iterator[str]:
    """Start a server with a database of its own. Yield its URL; outside of `runs_go_to` no run is sent there."""
    context, harness = copy_context(), prefect_test_harness(server_startup_timeout=120)
    context.run(harness.__enter__)  # its settings stay in that context
    try:
        yield context.run(PREFECT_API_URL.value)
    finally:
        context.run(harness.__exit__, None, None, None)


@contextmanager
def runs_go_to(url: str) -> Iterator[None]:
    """Send flow and task runs of the body to a server, and wait until it has their logs and events."""
    with temporary_settings({PREFECT_API_URL: url}):
        yield
        for worker in APILogWorker, EventsWorker:  # else they would go on sending to this server
            worker.drain_all()
