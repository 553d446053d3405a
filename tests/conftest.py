"""Settings for all tests."""

import atexit
import gc
import os
import signal
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

from prefect_rlhf.engines.gang.processes.preload import never_collected
from prefect_rlhf.errors.errors import InvalidInput
from tests.support.cases import examples
from tests.support.device import CHOSEN, check_choice
from tests.support.own_server import own_server, runs_go_to

# Machines that run the tests are shared and slow at times; how long an example takes is no promise of ours.
settings.register_profile(
    "search", deadline=None, suppress_health_check=list(HealthCheck), max_examples=examples(settings().max_examples)
)
# The same tree has the same result each time; `pytest --hypothesis-profile=search` looks for new examples.
settings.register_profile("same", settings.get_profile("search"), derandomize=True)
settings.load_profile("same")

# A script that starts the tests in the background has Ctrl-C ignored, and so would all that they start.
signal.signal(signal.SIGINT, signal.default_int_handler)

# Tests are of CPU ranks, also on a machine with GPUs; before torch looks for them. `make test-gpu` asks for a GPU.
if CHOSEN != "cuda":
    os.environ["CUDA_VISIBLE_DEVICES"] = ""

# vLLM inspects a model class in a process of its own, which takes 11 processor seconds, and keeps the result under the
# home folder. Many tests have a home of their own, and share the result.
os.environ.setdefault("VLLM_CACHE_ROOT", str(Path.home() / ".cache" / "vllm"))

TESTS = Path(__file__).parent
LONGEST = (
    "test_end_to_end.py",
    "test_resume.py",
    "test_worker.py",
    "test_local_run.py",
    "test_plan_invariance.py",
    "test_plan_switches.py",
    "test_gang.py",
    "test_runner.py",
    "test_secrets.py",
    "test_megatron_ranks.py",
    "test_site.py",
    "test_best_model.py",
)
"""Files that take 20 seconds or more: they come first, so that two workers end at about the same moment."""
LONGEST_SEARCH = "test_planned_run.py"
SEARCHING = ("placement/planner", "placement/search", "flows/planning", f"flows/{LONGEST_SEARCH}", "benchmarks")
"""Tests of plan searches come last, the longest first: `make test` compiles the search in the background."""


def pytest_configure():
    """End in a line, with status 1, if the device of the tests is not there."""
    try:
        check_choice()
    except InvalidInput as error:
        pytest.exit(str(error), returncode=1)


@pytest.hookimpl(wrapper=True)
def pytest_collection():
    """Keep the garbage collector away from imported modules; to scan them takes a second, again and again."""
    atexit.register(gc.unfreeze)  # libraries report objects that are never collected as leaks
    with never_collected():
        return (yield)


def pytest_collection_modifyitems(config, items):
    """Run the longest files first, and the searches last. With a GPU, run the tests for it and no other."""
    if CHOSEN != "cpu":
        others = [item for item in items if item.get_closest_marker("gpu") is None]
        config.hook.pytest_deselected(items=others)
        items[:] = [item for item in items if item.get_closest_marker("gpu")]

    def turn(item):
        if item.path.name in LONGEST:
            return LONGEST.index(item.path.name)
        if not any(item.path.is_relative_to(TESTS / place) for place in SEARCHING):
            return len(LONGEST)
        return len(LONGEST) + (1 if item.path.name == LONGEST_SEARCH else 2)

    items.sort(key=turn)


def pytest_ignore_collect(collection_path, config):
    """Import files without quick tests only if they are asked for: imports take longer than the quick tests."""
    is_other = collection_path.name.startswith("test_") and "mark.quick" not in collection_path.read_text()
    return True if config.option.markexpr == "quick" and is_other else None


@pytest.fixture(scope="module", autouse=True)
def pretended_gpu():
    """Let all tests of a file see the pretend GPU, if RLHF_TEST_DEVICE says so."""
    if CHOSEN == "pretend":
        from tests.support.pretend_gpu import pretend_gpu

        with pretend_gpu():
            yield
    else:
        yield


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
