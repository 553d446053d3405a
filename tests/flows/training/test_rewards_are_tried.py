"""Rewards are tried once in a start, before devices are used; the run of a shipped flow too."""

import pytest

from prefect_rlhf.flows.ppo import ppo
from prefect_rlhf.flows.training import request
from prefect_rlhf.flows.training.run import prepare
from prefect_rlhf.flows.training.spec.run_spec import asked_run
from prefect_rlhf.placement.devices.mesh import ClusterShape
from tests.support.runs import whole
from tests.support.tiny import ppo_parameters

DESK = whole(ClusterShape("desk", num_nodes=1, devices_per_node=1, device_memory_bytes=8 << 30))


@pytest.fixture(scope="module")
def parameters(tmp_path_factory):
    return ppo_parameters(tmp_path_factory.mktemp("ppo"))


@pytest.fixture
def warned(parameters, tmp_path, monkeypatch):
    """Prepare a run with a reward of this body, which notes each of its calls; returns warnings and number of calls."""
    warnings: list[str] = []
    monkeypatch.setattr(request, "log_warning", warnings.append)

    def prepared(body, restarts=False, reward_warnings=None, **function):
        calls = tmp_path / "calls.txt"
        calls.write_text("")
        (tmp_path / "mine.py").write_text(f"def f(row):\n    open({str(calls)!r}, 'a').write('x')\n    {body}\n")
        reward = {"functions": {"exact": {"function": f"{tmp_path / 'mine.py'}:f", **function}}}
        given = ppo.validate_parameters(parameters | {"reward": reward})
        asked = asked_run(ppo.algorithm, given)
        if restarts:
            asked = asked.restarted(tmp_path, {})
            monkeypatch.setattr(request, "find_checkpoint", lambda resume, place: None)
        prepare(asked, DESK, reward_warnings=reward_warnings)
        of_rewards = [line for line in warnings if "reward" in line]
        return of_rewards, len(calls.read_text())

    return prepared


def test_a_reward_that_fails_on_a_made_up_response_is_a_warning_before_the_run(warned, tmp_path):
    """Four rows of the training prompts and four held-out ones."""
    (warning,), calls = warned("return float(row['response'])")
    failed = (
        "failed on 4 of 4 rows of prompts with a made-up response, and may fail on real responses; row 0: ValueError"
    )
    assert warning.startswith(f"reward exact ({tmp_path / 'mine.py'}:f) {failed}")
    assert warning.endswith("mine.py:3 in f)")
    assert calls == 8


def test_a_correct_reward_passes_silently(warned):
    assert warned("return 1.0") == ([], 8)


def test_a_reward_that_must_not_be_tried_is_not_called(warned):
    assert warned("return 1.0", try_first=False) == ([], 0)


def test_a_run_that_starts_again_has_tried_its_rewards(warned):
    assert warned("return 1.0", restarts=True) == ([], 0)


def test_a_run_that_is_prepared_again_tells_the_warnings_of_its_check(warned):
    """It was checked before it leased its devices, which it then probed or measured."""
    assert warned("return 1.0", reward_warnings=("reward as before",)) == (["reward as before"], 0)
