"""A reward model's score is within the bound of scores, or the row has none; too many such rows end the run."""

import math
from pathlib import Path

import pytest
import torch

from prefect_rlhf.engines.commands import CallCommand
from prefect_rlhf.engines.rank.model_scores import within_bound
from prefect_rlhf.errors.errors import BeyondBound
from prefect_rlhf.placement.devices.mesh import DeviceMesh
from prefect_rlhf.placement.devices.strategy import Strategy
from prefect_rlhf.placement.graph import Call, Operation
from prefect_rlhf.placement.plan import ModelInstance
from prefect_rlhf.placement.row_set import RowSet

CALL = Call("judge", "inference", "reward", (), ("scores",), Operation("scores"), RowSet("prompts", 20), 20)
REWARD = ModelInstance("reward", "megatron", DeviceMesh(0, 1, 0, 1), Strategy())
COMMAND = CallCommand(3, CALL, REWARD, tuple(range(100, 120)), tuple(range(20)), 0, Path(), "")


def scores_with(*wrong):
    return list(torch.tensor([*wrong, *[0.5] * (20 - len(wrong))]))


def test_scores_at_the_bound_stay_as_they_are():
    kept, failed = within_bound(COMMAND, scores_with(1e9, -1e9))
    assert torch.stack(kept).equal(torch.stack(scores_with(1e9, -1e9)))
    assert failed == 0


@pytest.mark.parametrize("wrong", [math.inf, -math.inf, math.nan, 1.1e9, -3e38])
def test_a_score_beyond_the_bound_counts_as_missing(wrong):
    kept, failed = within_bound(COMMAND, scores_with(1.0, wrong))
    assert torch.stack(kept).isnan().tolist() == [False, True, *[False] * 18]
    assert failed == 1 / 20


def test_more_than_a_tenth_of_such_rows_end_the_run_with_call_model_row_and_value():
    with pytest.raises(BeyondBound) as caught:
        within_bound(COMMAND, scores_with(0.0, math.inf, 2e9, math.nan))
    assert str(caught.value) == (
        "judge · step 3: reward gave no score to 3 of 20 rows, at most 10% may; row 101: got inf,"
        " expected a number from -1e+09 to 1e+09"
    )
