"""Two models on the same prompts: paired differences by hand, and the page of the prompts where they differ most."""

import math

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from prefect_rlhf.errors.errors import InvalidInput
from prefect_rlhf.flows.algorithm.evaluation.against import Answered, page, write_against
from prefect_rlhf.tasks.rl.evaluation.intervals import interval
from prefect_rlhf.tasks.rl.evaluation.sets import SetSettings

pytestmark = pytest.mark.quick
SETTINGS = SetSettings(folder="evaluation_math", samples=2, max_new_tokens=8)


def answered(folder, rewards, ids=None, tokens=3.0):
    """Write the rows of a run: two samples to each prompt, with these rewards; return its folder."""
    ids = range(len(rewards)) if ids is None else ids
    rows = [
        {
            "row_id": number,
            "user_message": f"question {number}",
            "response": f"{folder.name} says {reward}",
            "reward": reward,
            "response_tokens": tokens,
            "truncated": 0.0,
            "answer": int(reward == 1),
        }
        for number, pair in zip(ids, rewards, strict=True)
        for reward in pair
    ]
    (folder / "evaluation_math").mkdir(parents=True)
    pq.write_table(pa.Table.from_pylist(rows), folder / "evaluation_math" / "step-000001.parquet")
    return folder


def test_a_difference_is_of_the_same_prompts_with_a_paired_interval(tmp_path):
    """A prompt that only one of them answered, or has no score of, does not count; hard prompts are hard for both."""
    one = answered(tmp_path / "one", [(1.0, 0.0), (0.0, 0.0), (1.0, 1.0), (0.0, None), (1.0, 1.0)])
    other = answered(tmp_path / "other", [(1.0, 1.0), (0.0, 1.0), (1.0, 1.0), (math.nan, math.nan)], tokens=5.0)
    both = Answered.read("math", one, other, 2)
    found = {each.metric: each for each in both.differences(SETTINGS, same_tokens=True)}
    assert list(found) == ["avg@2", "pass@1", "pass@2", "maj@2", "response_tokens", "truncated"]
    average = found["avg@2"]
    assert (average.first, average.second, average.prompts) == (0.5, pytest.approx(2.5 / 3), 3)
    assert average.difference == interval(np.array([0.5, 0.5, 0.0]))
    assert str(average).startswith("math avg@2: 0.5 -> 0.833, +0.333, 95%: ")
    assert found["response_tokens"].difference.mean == 2.0


def test_with_other_tokenizers_lengths_in_tokens_are_not_compared(tmp_path):
    folders = [answered(tmp_path / name, [(1.0, 0.0)]) for name in ("one", "other")]
    metrics = [each.metric for each in Answered.read("math", *folders, 2).differences(SETTINGS, same_tokens=False)]
    assert metrics == ["avg@2", "pass@1", "pass@2", "maj@2"]


def test_equal_models_differ_by_zero_and_unequal_models_by_more(tmp_path):
    """The interval of a model against itself is a point, however hard it is to say how good the model is."""
    scores = [tuple(pair) for pair in np.random.default_rng(5).integers(0, 2, (40, 2)).astype(float).tolist()]
    one, same = answered(tmp_path / "one", scores), answered(tmp_path / "same", scores)
    better = answered(tmp_path / "better", [(1.0, 1.0)] * 40)
    (equal, *_), (ahead, *_) = (
        Answered.read("math", one, other, 2).differences(SETTINGS, same_tokens=True) for other in (same, better)
    )
    assert equal.difference.as_difference == "+0, 95%: +0 to +0"
    assert 0 < ahead.difference.low < ahead.difference.mean < ahead.difference.high


def test_the_page_and_the_file_begin_with_the_prompts_where_they_differ_most(tmp_path):
    one = answered(tmp_path / "one", [(0.0, 0.0), (1.0, 0.0), (1.0, 1.0), (None, None)])
    other = answered(tmp_path / "other", [(0.0, 0.0), (1.0, 1.0), (0.0, 0.0), (1.0, 1.0)])
    both = Answered.read("math", one, other, 2)
    assert [row["row_id"] for row in both.rows()] == [2, 1, 0, 3]
    text = page(("m/one", "m/other"), both.differences(SETTINGS, same_tokens=True), [both], "")
    assert text.index("row 2: reward 1 -> 0") < text.index("row 1: reward 0.5 -> 1")
    assert "row 0" not in text and "    other says 0.0" in text
    file = write_against(one, [both], text)
    assert file.read_text() == text
    assert pq.read_table(one / "against" / "math.parquet").column("difference").to_pylist()[:2] == [-1.0, 0.5]


def test_runs_without_a_prompt_in_common_are_refused(tmp_path):
    one, other = answered(tmp_path / "one", [(1.0, 1.0)]), answered(tmp_path / "other", [(1.0, 1.0)], ids=[7])
    with pytest.raises(InvalidInput, match="evaluation.math: got 'no prompt', expected prompts that both"):
        Answered.read("math", one, other, 2)
