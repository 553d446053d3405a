"""Settings for all tests."""

import os
import signal
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

from tests.own_server import own_server, runs_go_to

# Machines that run the tests are shared and slow at times; how long an example takes is no promise of ours.
settings.register_profile("search", deadline=None, suppress_health_check=list(HealthCheck))
# The same tree has the same result each time; `pytest --hypothesis-profile=search` looks for new examples.
settings.register_profile("same", settings.get_profile("search"), derandomize=True)
settings.load_profile("same")

# A script that starts the tests in the background has Ctrl-C ignored, and so would all that they start.
signal.signal(signal.SIGINT, signal.default_int_handler)

# Tests are of CPU ranks, also on a machine with GPUs; before torch looks for them.
os.environ["CUDA_VISIBLE_DEVICES"] = ""

BENCHMARKS = Path(__file__).parent / "benchmarks"
LONGEST = (
    "test_end_to_end.py",
    "test_chaos.py",
    "test_worker.py",
    "test_resume.py",
    "test_plan_invariance.py",
    "test_runner.py",
    "test_server_away.py",
)
"""Files that take a minute or more: they come first, so that two files at a time end at about the same moment."""


def pytest_collection_modifyitems(items):
    """Run the longest files first, and benchmarks last: they need the search, which `make test` compiles meanwhile."""

    def turn(item):
        name = item.path.name
        return LONGEST.index(name) if name in LONGEST else len(LONGEST) + item.path.is_relative_to(BENCHMARKS)

    items.sort(key=turn)


def pytest_ignore_collect(collection_path, config):
    """Import files without quick tests only if they are asked for: imports take longer than the quick tests."""
    is_other = collection_path.name.startswith("test_") and "mark.quick" not in collection_path.read_text()
    return True if config.option.markexpr == "quick" and is_other else None


@pytest.fixture(scope="session")
def server_url():
    """The Prefect server of this process."""
    with own_server() as url:
        yield url


@pytest.fixture(scope="module")
def prefect(server_url):
    """Send the runs of a file to the server of this process."""
    with runs_go_to(server_url):
        yield
