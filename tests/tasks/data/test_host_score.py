"""Scores by functions, from a rank's rows to columns: real worker processes."""

import math
from pathlib import Path

import pytest
import torch

from prefect_rlhf.engines.compute import Context
from prefect_rlhf.engines.rows import Batch
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

    def run(*names, **settings):
        functions = {name: RewardFunction(function=f"{file}:{name}", weight=2.0) for name in names}
        rewards = HostRewards(functions=functions, retries=0, **settings).model_dump_json()
        try:
            return HostScore(rewards)(rollout, Context(0, Path(), "", (0, 1, 2, 3)))
        finally:
            pool_of(rewards).close()

    return run


def test_a_score_is_the_weighted_sum_of_those_that_apply(score):
    made = score("number", "for_odd_ones")
    assert made.columns["scores"].tolist() == [0, 202, 4, 206]
    assert made.columns["for_odd_ones"].isnan().tolist() == [True, False, True, False]
    assert made.metrics["number"] == 1.5 and made.metrics["for_odd_ones"] == 100.0 and made.metrics["failed"] == 0


def test_a_prompt_that_an_earlier_call_made_is_the_text_that_the_model_read(rollout):
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


def test_a_row_on_which_one_function_failed_has_no_score_unless_it_has_a_value_for_that(score):
    made = score("number", "fails_on_two", most_failed=0.5)
    assert [math.isnan(value) for value in made.columns["scores"]] == [False, False, True, False]
    assert made.metrics["failed"] == 0.25
    made = score("number", "fails_on_two", most_failed=0.5, failed_value=-1.0)
    assert made.columns["scores"].tolist() == [20, 22, 2, 26]
