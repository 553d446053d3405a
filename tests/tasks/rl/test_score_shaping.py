"""Responses that were cut off: which they are, and the penalty of DAPO's equation 13."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from prefect_rlhf.engines.rows import Batch
from prefect_rlhf.tasks.rl.score_shaping import overlong_penalty, truncated_rows
from tests.tasks.rl import trl_formulas as trl


@pytest.mark.parametrize(("length", "penalty"), [(1, 0), (80, 0), (85, -0.25), (100, -1), (130, -1)])
def test_the_penalty_by_hand(length, penalty):
    """At most 100 tokens, the last 20 of them dear."""
    assert float(overlong_penalty(torch.tensor(float(length)), 100, 20)) == penalty


@given(length=st.integers(1, 300), limit=st.integers(1, 200), share=st.floats(0.01, 1))
def test_the_penalty_equals_trls(length, limit, share):
    buffer = max(1, int(limit * share))
    made = overlong_penalty(torch.tensor(length, dtype=torch.float64), limit, buffer)
    assert float(made) == pytest.approx(trl.soft_overlong_punishment(length, limit, buffer), abs=1e-12)


def test_rows_of_a_computation_count_as_cut_at_maximum_length_and_rows_of_a_generate_as_it_says():
    rows = {"logprobs": [torch.zeros(2), torch.zeros(3)]}
    assert truncated_rows(Batch(rows), 3).tolist() == [0, 1]
    said = rows | {"truncated": [torch.tensor(True), torch.tensor(False)]}
    assert truncated_rows(Batch(said), 3).tolist() == [1, 0]
