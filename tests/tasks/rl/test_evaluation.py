"""Pair accuracy: by hand."""

import pytest
import torch

from prefect_rlhf.engines.rows import Batch
from prefect_rlhf.tasks.rl.evaluation import pair_accuracy
from prefect_rlhf.tasks.settings import Settings


def test_right_wrong_and_tied_pairs():
    """Margins 2, -1 and 0: one pair right, one wrong, one half."""
    scores = Batch({"scores": [torch.tensor(score) for score in (2.0, 0.0, 1.0, 2.0, 3.0, 3.0)]})
    metrics = pair_accuracy.function(scores, Settings()).metrics
    assert metrics == pytest.approx({"accuracy": 0.5, "margin": 1 / 3, "score": 11 / 6})
