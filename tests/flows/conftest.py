"""The parameters of a small PPO run, and a home without what other programs left."""

import pytest

from tests.support.tiny import ppo_parameters


@pytest.fixture(scope="module")
def parameters(tmp_path_factory):
    """Of PPO on models of a few thousand weights."""
    return ppo_parameters(tmp_path_factory.mktemp("tiny"))


@pytest.fixture
def own_home(monkeypatch, tmp_path):
    """Leases, plans and profiles of this test alone."""
    monkeypatch.setenv("HOME", str(tmp_path))
