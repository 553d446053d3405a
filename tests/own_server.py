"""A temporary Prefect server for one file of tests, or for a few."""

from collections.abc import Iterator
from contextlib import contextmanager

from prefect.events.worker import EventsWorker
from prefect.testing.utilities import prefect_test_harness


@contextmanager
def own_server() -> Iterator[None]:
    """Start a server; task runs of the body go there, whatever server an earlier file's went to."""
    with prefect_test_harness(server_startup_timeout=120):
        EventsWorker.drain_all()  # that of the earlier server would go on sending there, and each run wait for it
        yield
