"""One Prefect server for all tests of flows, and a small PPO run's parameters."""

import pytest

from tests.own_server import own_server
from tests.tiny import ppo_parameters


@pytest.fixture(scope="package")
def prefect():
    with own_server():
        yield


@pytest.fixture(scope="module")
def parameters(tmp_path_factory):
    """Of PPO on models of a few thousand weights."""
    return ppo_parameters(tmp_path_factory.mktemp("tiny"))
