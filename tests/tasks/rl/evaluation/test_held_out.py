"""Metrics of evaluations: by hand."""

import math

import pytest
import torch

from prefect_rlhf.engines.compute import Context
from prefect_rlhf.engines.rows import Batch
from prefect_rlhf.tasks.rl.evaluation.held_out import pair_accuracy, record_evaluation
from prefect_rlhf.tasks.rl.safety import record_safe_evaluation
from prefect_rlhf.tasks.settings import Settings
from tests.tasks.small_tokenizer import save_small_tokenizer


def test_right_wrong_and_tied_pairs():
    """Margins 2, -1 and 0: one pair right, one wrong, one half."""
    scores = Batch({"scores": [torch.tensor(score) for score in (2.0, 0.0, 1.0, 2.0, 3.0, 3.0)]})
    metrics = pair_accuracy.function(scores, Settings()).metrics
    assert metrics == pytest.approx({"accuracy": 0.5, "margin": 1 / 3, "score": 11 / 6})


def test_a_pair_counts_if_both_answers_have_a_score():
    """Margins 2 and unknown."""
    scores = Batch({"scores": [torch.tensor(score) for score in (2.0, 0.0, 1.0, math.nan)]})
    assert pair_accuracy.function(scores, Settings()).metrics == {"accuracy": 1.0, "margin": 2.0, "score": 1.0}


def test_pairs_without_any_score_have_no_metric():
    scores = Batch({"scores": [torch.tensor(math.nan)] * 2})
    assert pair_accuracy.function(scores, Settings()).metrics == {}


@pytest.mark.parametrize(
    ("scores", "expected"),
    [([1.0, math.nan], {"score": 1.0, "score_exact": 3.0, "unscored": 0.5}), ([math.nan] * 2, {"unscored": 1.0})],
)
def test_a_mean_over_responses_without_a_score_is_left_out(tmp_path, scores, expected):
    """No reward is not a reward of 0."""
    rollout = {
        "tokens": [torch.tensor([5, 6])] * 2,
        "prompt_length": [torch.tensor(1)] * 2,
        "logprobs": [torch.tensor([-1.0])] * 2,
    }
    named = {"exact": [3 * torch.tensor(score) for score in scores], "short": [torch.tensor(math.nan)] * 2}
    scored = Batch({"scores": [torch.tensor(score) for score in scores], **named})
    context, written = Context(0, tmp_path, "", (0, 1)), Batch(rollout, written_by=save_small_tokenizer(tmp_path))
    metrics = record_evaluation.function(written, scored, Settings(), context).metrics
    assert metrics == expected | {"response_tokens": 1.0}
    costs = record_safe_evaluation.function(written, scored, scored, Settings(), context).metrics
    assert ("cost" in costs) == ("score" in costs) == ("score" in expected)
