"""Settings for all tests."""

import os
import signal
from pathlib import Path

from hypothesis import HealthCheck, settings

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
