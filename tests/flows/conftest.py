"""The parameters of a small PPO run."""

import pytest

from tests.tiny import ppo_parameters


@pytest.fixture(scope="module")
def parameters(tmp_path_factory):
    """Of PPO on models of a few thousand weights."""
    return ppo_parameters(tmp_path_factory.mktemp("tiny"))
