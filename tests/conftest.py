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


def pytest_collection_modifyitems(items):
    """Run what needs the compiled search at once last: `make test` compiles it meanwhile."""
    items.sort(key=lambda item: item.path.is_relative_to(BENCHMARKS))
