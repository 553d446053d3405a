"""What of a run's metrics its curves show, however long it is."""

from hypothesis import given
from hypothesis import strategies as st

from prefect_rlhf.tasks.reporting.history import MOST_CURVES, MOST_STEPS, History


@given(st.integers(1, 3000), st.integers(0, 500))
def test_a_run_of_any_length_keeps_its_first_and_last_step_and_few_between(number, first):
    """A run that goes on from a checkpoint begins later."""
    history = History()
    for step in range(first, first + number):
        history.add({"step": step, "actor_train.loss": float(step), "actor_train.ratio": 1.0})
    curves = history.curves()
    assert list(curves) == ["actor_train.loss"]
    steps = [step for step, value in curves["actor_train.loss"]]
    assert steps == sorted(set(steps)) and len(steps) <= MOST_STEPS + 1
    assert steps[-1] == first + number - 1
    assert steps[0] - first <= number / MOST_STEPS * 4
    assert all(value == step for step, value in curves["actor_train.loss"])


def test_scores_come_first_then_kl_then_losses_and_no_more_than_a_page_of_them():
    history = History()
    names = ["critic_train.loss", "actor_train.loss", "rewards.kl", "score.exact", "rewards.score"]
    history.add({"step": 0} | dict.fromkeys(names, 1.0) | {f"c{number}.entropy": 0.0 for number in range(20)})
    assert list(history.curves())[:5] == ["score.exact", "rewards.score", "rewards.kl", *names[:2]]
    assert len(history.curves()) == MOST_CURVES


def test_an_evaluation_after_the_last_step_ends_its_curve():
    history = History()
    history.add({"step": 0, "record_evaluation.score": 1.0, "rewards.kl": 0.0})
    history.add({"step": 1, "rewards.kl": 0.5})
    history.add({"step": 2, "record_evaluation.score": 3.0})
    assert history.curves()["record_evaluation.score"] == [(0, 1.0), (2, 3.0)]
    assert history.curves()["rewards.kl"] == [(0, 0.0), (1, 0.5)]


def test_an_interval_is_its_metrics_band_and_not_a_curve():
    """Of the reward in training and of named sets; rates, cuts and the KL have curves too."""
    history = History()
    ends = {"grpo_advantages.score_low": 0.1, "grpo_advantages.score_high": 0.4}
    of_set = {"evaluation_math.pass@4": 0.5, "evaluation_math.pass@4_low": 0.4, "evaluation_math.pass@4_high": 0.6}
    others = ["actor_train.kl", "actor_generate.truncated", "actor_train.learning_rate"]
    history.add({"step": 1, "grpo_advantages.score": 0.2, **ends, **of_set, **dict.fromkeys(others, 1.0)})
    history.add({"step": 2, "grpo_advantages.score": 0.3})
    assert list(history.curves()) == ["grpo_advantages.score", "evaluation_math.pass@4", *others]
    assert history.bands() == {"grpo_advantages.score": [(1, 0.1, 0.4)], "evaluation_math.pass@4": [(1, 0.4, 0.6)]}
