"""One Prefect server for all tests of flows, and a small PPO run's parameters."""

import pytest
from prefect.testing.utilities import prefect_test_harness

from tests.tiny import ppo_parameters


@pytest.fixture(scope="package")
def prefect():
    with prefect_test_harness(server_startup_timeout=120):
        yield


@pytest.fixture(scope="module")
def parameters(tmp_path_factory):
    """Of PPO on models of a few thousand weights."""
    return ppo_parameters(tmp_path_factory.mktemp("tiny"))
