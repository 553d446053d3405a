"""A score that a computation makes is a number within the bound of scores, or NaN."""

import math

import pytest
import torch

from prefect_rlhf.engines.compute import Computed
from prefect_rlhf.engines.rows import Batch
from prefect_rlhf.tasks.settings import Settings
from prefect_rlhf.tasks.tracing.operations import NONE, WrongOperator, computation


class Given(Settings):
    """The score of row 1, as text: settings hold no NaN."""

    score: str


@computation("scores")
def scores_of_a_person(rows: Batch, settings: Given) -> Computed:
    """Score the rows as the settings say."""
    return Computed({"scores": torch.tensor([0.0, float(settings.score), 1.0])})


ROWS = Batch({"tokens": [torch.tensor([1])] * 3})


@pytest.mark.parametrize("score", [1e9, -1e9, math.nan])
def test_a_score_within_the_bound_or_none_passes(score):
    made = scores_of_a_person(Given(score=str(score)))(ROWS)
    assert made.columns["scores"][1].item() == pytest.approx(score, nan_ok=True)


@pytest.mark.parametrize("score", [2e9, -1e20, 1e39])
def test_a_score_beyond_the_bound_is_refused_with_row_function_file_and_line(score):
    """In float32, 1e39 is infinity."""
    with pytest.raises(WrongOperator) as refused:
        scores_of_a_person(Given(score=str(score)))(ROWS)
    said = str(refused.value)
    assert said.startswith("score of row 1 that scores_of_a_person returns: got ")
    assert "expected a number from -1e+09 to 1e+09, or NaN for a row without a score (" in said
    assert "test_scores_of_computations.py:" in said


@computation("scores")
def a_vector_per_row(rows: Batch, settings: Settings) -> Computed:
    """Make rows of two numbers, and of none."""
    return Computed({"scores": [torch.tensor([1.0, -2e9]), torch.tensor([]), torch.tensor(1)]})


def test_every_number_of_a_row_is_checked():
    with pytest.raises(WrongOperator, match="score of row 0"):
        a_vector_per_row(NONE)(ROWS)
