"""Functions that were written for TRL, verl and reasoning-gym run as they are, with what they would get there."""

from dataclasses import replace

import of_reasoning_gym
import of_trl
import of_verl
import pytest
from host_cases import function, row

from prefect_rlhf.engines.functions.function import HostSettings
from prefect_rlhf.engines.functions.scoring.pool import HostPool

STRICT = HostSettings(workers=2, deadline_seconds=60.0, retries=0, most_failed=0.0)
CHAT = [{"role": "user", "content": "2 + 2?"}]
TRUTHS = ["a", None, "ccc"] * 14
ROWS = [row("a" * (n % 3 + 1), ground_truth=truth) for n, truth in enumerate(TRUTHS)]
RESPONSES = [r["response"] for r in ROWS]


def score(function, rows):
    with HostPool([function], STRICT) as pool:
        return pool.score(rows, "a test")


def test_trl_completions_are_chats_where_prompts_are():
    thoughts = ["<think>two and two</think>four", "four", "<think>a</think><think>b</think>"]
    rows = [row(thought, prompt=CHAT) for thought in thoughts]
    expected = of_trl.think_format_reward([[{"role": "assistant", "content": thought}] for thought in thoughts])
    assert score(function("think_format_reward", "trl"), rows).values["think_format_reward"] == tuple(expected)


def test_trl_columns_are_lists_and_none_means_not_applicable():
    """As many as there are rows, over several batches."""
    assert score(function("exact", "trl"), ROWS).values["exact"] == tuple(of_trl.exact(RESPONSES, TRUTHS))


def test_a_trl_function_gets_only_the_columns_that_it_names():
    rows = [row("abc", ground_truth="d", index=3)] * 3
    assert score(function("named_only", "trl"), rows).values["named_only"] == (10.0,) * 3


def test_a_trl_function_gets_token_ids():
    rows = [row("a", response_ids=[1, 2, 3]), row("b", response_ids=[])]
    assert score(function("ids", "trl"), rows).values["ids"] == (6.0, 0.0)


def test_a_trl_function_may_log():
    assert score(function("columns", "trl"), ROWS[:3]).metrics == {"columns/longest": 3.0}


def test_an_async_trl_function_is_awaited():
    assert score(function("asynchronous", "trl"), ROWS).values["asynchronous"] == tuple(map(float, map(len, RESPONSES)))


@pytest.mark.parametrize(
    "truth",
    [
        {"ground_truth": "72"},
        {"reward_model": {"style": "rule", "ground_truth": "72"}},
        {"reward_model.ground_truth": "72"},
    ],
)
def test_a_verl_function_gets_its_four_arguments(truth):
    """Other numbers of its dict are metrics: their means."""
    rows = [
        {"prompt": CHAT, "response": text, "data_source": "openai/gsm8k", "extra_info": {"index": index}} | truth
        for index, text in enumerate(["it is 72", "so\n#### 72", "#### 7", "#### 7,2"])
    ]
    scores = score(function("compute_score", "verl"), rows)
    expected = [
        of_verl.compute_score("openai/gsm8k", r["response"], "72", {"index": n})["score"] for n, r in enumerate(rows)
    ]
    assert scores.values["compute_score"] == tuple(map(float, expected)) == (0.0, 1.0, 0.0, 3.0)
    assert scores.metrics == {"compute_score/acc": 0.5, "compute_score/turns": 2.0}


def test_other_numbers_whose_sum_may_overflow_are_left_out():
    rows = [row("it", data_source="x", ground_truth="72")] * 3
    assert score(function("with_huge_numbers", "verl"), rows).metrics == {"with_huge_numbers/c": -1e29}


@pytest.mark.parametrize(
    ("name", "signature", "says"),
    [
        ("with_many_numbers", "verl", "returned 65 numbers besides the score, with 'number 64', expected at most 64 ("),
        ("with_a_long_name", "verl", "returned a number named 'nnn"),
        ("logs_a_long_name", "trl", "WrongName: log_metric got a number named 'nnn"),
    ],
)
def test_a_row_with_too_many_numbers_or_too_long_a_name_fails(name, signature, says):
    """They would stand in each line of a run's metrics."""
    rows = [row("it", data_source="x", ground_truth="72")]
    with HostPool([function(name, signature)], replace(STRICT, most_failed=1.0)) as pool:
        (failure,) = pool.score(rows, "a test").failures
    assert failure.reason.startswith(says) and len(failure.reason) < 600


def test_an_async_verl_function_is_awaited():
    rows = [row("#### 72", data_source="x", ground_truth="72"), row("#### 7", data_source="x", ground_truth="72")]
    assert score(function("asynchronous", "verl"), rows).values["asynchronous"] == (1.0, 0.0)


def test_a_dict_without_a_score_fails():
    with HostPool([function("without_score", "verl")], HostSettings(1, 60.0, 0, most_failed=1.0)) as pool:
        (failure,) = pool.score([row("a", data_source="x")], "a test").failures
    assert failure.reason.startswith("returned a dict without score: {'acc': 1.0} (")


@pytest.mark.parametrize("nested", [True, False], ids=["entry", "columns"])
def test_score_answer_gets_the_last_answer_and_the_entry(nested):
    """The whole response where it has no `<answer>`."""
    entry = {"question": "2 + 2?", "answer": "4", "metadata": {"difficulty": 1}}
    columns = {"entry": entry} if nested else entry
    rows = [row(text, **columns) for text in ["4", " 4\n", "<answer>5</answer> <answer> 4 </answer>", "4 or 5", "5"]]
    expected = tuple(of_reasoning_gym.score_answer(text, entry) for text in ["4", "4", "4", "4 or 5", "5"])
    assert score(function("score_answer", "reasoning_gym"), rows).values["score_answer"] == expected
