"""The line of a step: what is wrong with it is always there, and a row without a reward has no reward of 0."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from prefect_rlhf.tasks.reporting.history import History
from prefect_rlhf.tasks.reporting.step_line import LONGEST_LINE, StepLines

pytestmark = pytest.mark.quick

STEP = {"step": 3, "seconds": 9.81}
PHRASES = ("informative kept no row: nothing learnt", "every answer was cut and masked: nothing learnt")


@pytest.mark.parametrize("score", [{}, {"grpo_advantages.score": 0.0}], ids=["absent", "0"])
def test_a_step_without_rewards_says_so(score):
    """Whether or not the metric of the scores exists then."""
    step = STEP | {"score.failed": 0.0, "score.seconds": 0.5, "score.unscored": 1.0, "grpo_advantages.unscored": 1.0}
    phrase = "no row has a reward: nothing learnt"
    line = StepLines(12).line(step | score, phrase)
    assert line == f"step 3 of 12 · 9.8 s · no reward · {phrase} · 1 min left"


def test_an_evaluation_without_rewards_says_so_beside_a_step_with_rewards():
    values = {"rewards.score": 0.5, "rewards.unscored": 0.9, "record.score": 0.0, "record.unscored": 1.0}
    line = StepLines(3, ["record"]).line(STEP | values)
    assert line == "step 3 of 3 · 9.8 s · reward 0.5 · held-out no reward"


def test_a_reward_of_0_is_shown_as_0():
    assert "reward 0" in StepLines(3).line(STEP | {"rewards.score": 0.0, "rewards.unscored": 0.0})


@given(st.sampled_from(PHRASES), st.integers(1, 10**6), st.booleans(), st.floats(-1e9, 1e9))
def test_a_steps_phrase_is_on_its_line_however_many_values_follow(phrase, num_steps, has_reward, value):
    """Values make room for it, and the line stays within a terminal's width."""
    names = [*(["rewards.score"] if has_reward else []), "actor_train.accuracy", "rewards.kl", "record.score"]
    values = dict.fromkeys(names, value)
    line = StepLines(num_steps, ["record"]).line({"step": 1, "seconds": 123.4, **values}, phrase)
    assert phrase in line and len(line) <= LONGEST_LINE
    assert ("reward" in line) == has_reward or num_steps > 1000


def test_curves_skip_steps_without_a_reward():
    history = History()
    history.add({"step": 0, "rewards.score": 1.0, "rewards.unscored": 0.0, "rewards.kl": 0.1})
    history.add({"step": 1, "rewards.score": 0.0, "rewards.unscored": 1.0, "rewards.kl": 0.2})
    history.add({"step": 2, "rewards.unscored": 1.0, "rewards.kl": 0.3})
    assert history.curves() == {"rewards.score": [(0, 1.0)], "rewards.kl": [(0, 0.1), (1, 0.2), (2, 0.3)]}
