"""Scores by functions, from a rank's rows to columns: real worker processes."""

import math
from pathlib import Path

import pytest
import torch

from prefect_rlhf.engines.compute import Context
from prefect_rlhf.engines.functions.scoring.pool import HostFunctionFailed
from prefect_rlhf.engines.rows import Batch
from prefect_rlhf.errors.errors import InvalidInput
from prefect_rlhf.tasks.data.host_score import HostScore, plain_rows, pool_of
from prefect_rlhf.tasks.host_rewards import HostRewards, RewardFunction
from tests.tasks.small_tokenizer import save_small_tokenizer

FUNCTIONS = """
def number(row):
    return row["number"]

def fails_on_two(row):
    if row["number"] == 2:
        raise ValueError("two")
    return 10.0

def huge(row):
    return row["number"] * 3e8

def for_odd_ones(row):
    return 100.0 if row["number"] % 2 else None
"""


class Numbers:
    """A dataset whose rows have their own number."""

    kinds = {"number": "number"}

    def read(self, name):
        return [0, 1, 2, 3]


@pytest.fixture
def rollout(tmp_path):
    tokens = [torch.tensor([5, 6, 7, 8])] * 4
    columns, folder = {"tokens": tokens, "prompt_length": [torch.tensor(2)] * 4}, save_small_tokenizer(tmp_path)
    return Batch(columns, torch.tensor([0, 0, 1, 1]), Numbers(), folder)


@pytest.fixture
def score(rollout, tmp_path):
    file = tmp_path / "functions_of_a_person.py"
    file.write_text(FUNCTIONS)

    def run(*names, weight=2.0, call="score", **settings):
        functions = {name: RewardFunction(function=f"{file}:{name}", weight=weight) for name in names}
        rewards = HostRewards(functions=functions, retries=0, **settings).model_dump_json()
        try:
            return HostScore(rewards, call=call)(rollout, Context(0, Path(), "", (0, 1, 2, 3)))
        finally:
            pool_of(rewards).close()

    return run


def test_a_score_is_the_weighted_sum_of_functions_that_apply(score):
    made = score("number", "for_odd_ones")
    assert made.columns["scores"].tolist() == [0, 202, 4, 206]
    assert made.columns["for_odd_ones"].isnan().tolist() == [True, False, True, False]
    assert made.metrics["number"] == 1.5 and made.metrics["for_odd_ones"] == 100.0 and made.metrics["failed"] == 0
    assert made.metrics["unscored"] == 0 and score("for_odd_ones").metrics["unscored"] == 0.5


def test_a_computed_prompt_reaches_functions_as_the_models_text(rollout):
    """Whatever the dataset's column of prompts is called."""

    class Asked(Numbers):
        kinds = {"prompt": "text"}

        def read(self, name):
            return ["of the dataset"] * 4

    asked = Batch(rollout.columns, rollout.groups, Asked(), rollout.tokenizer)
    assert plain_rows(asked, own_prompts=False)[0]["prompt"] == "of the dataset"
    assert plain_rows(asked, own_prompts=True)[0] == {
        "prompt": "a good",
        "response": "bad film",
        "response_ids": [7, 8],
    }


def test_a_row_with_a_failed_function_has_no_score_without_a_failed_value(score):
    made = score("number", "fails_on_two", most_failed=0.5)
    assert [math.isnan(value) for value in made.columns["scores"]] == [False, False, True, False]
    assert made.metrics["failed"] == 0.25
    made = score("number", "fails_on_two", most_failed=0.5, failed_value=-1.0)
    assert made.columns["scores"].tolist() == [20, 22, 2, 26]


@pytest.mark.parametrize(("failed_value", "expected"), [(None, math.nan), (-1.0, -1.0)])
def test_a_row_with_a_sum_beyond_the_bound_fails(score, failed_value, expected):
    """Each reward is within it, and 2 * 6e8 is not, though float32 holds it."""
    made = score("number", "huge", most_failed=0.5, failed_value=failed_value)
    assert made.columns["scores"].tolist() == pytest.approx([0, 6e8 + 2, expected, expected], nan_ok=True)
    assert made.metrics["failed"] == 0.5


def test_too_many_sums_beyond_the_bound_end_the_run_and_show_a_rows_terms(score):
    with pytest.raises(HostFunctionFailed) as caught:
        score("number", "huge", weight=1e6, call="reward_evaluation")
    said = str(caught.value)
    assert said.startswith(
        "reward_evaluation · step 0: the weighted sum of rewards is beyond its bound on 3 of 4 rows; row 1: 1e+06 * 1"
        " of number + 1e+06 * 3e+08 of huge, expected a number from -1e+09 to 1e+09; lower the weight of huge (/"
    )
    assert said.endswith("functions_of_a_person.py:huge)")


def test_a_failure_names_its_own_call(score):
    """A run scores rows of training and held-out rows, with the same functions."""
    with pytest.raises(HostFunctionFailed, match="^reward_evaluation · step 0: fails_on_two "):
        score("fails_on_two", call="reward_evaluation")


def test_a_failed_value_beyond_the_bound_when_weighted_is_refused():
    heavy = {"exact": RewardFunction(function="mine:exact", weight=-1e6)}
    assert HostRewards(functions=heavy, failed_value=-1000).failed_value == -1000
    with pytest.raises(InvalidInput, match="failed_value: got 1001, expected at most 1000 in size, since a weight"):
        HostRewards(functions=heavy, failed_value=1001)
