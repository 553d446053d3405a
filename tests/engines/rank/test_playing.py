"""Metrics of plays: a mean over no answers is no metric."""

import pytest

from prefect_rlhf.engines.engine import Conversed, PlayEnd
from prefect_rlhf.engines.rank.playing import means_over_rows

pytestmark = pytest.mark.quick


def means(*ends):
    row = [[1]] * len(ends)
    return means_over_rows(Conversed(prompts=row, tokens=row, logprobs=row, mask=row, turns=row, ends=ends))


def test_without_answers_the_seconds_of_an_answer_are_unknown():
    found = means(PlayEnd(0, 1.0, (0.0,)), PlayEnd(1, 1.0, (0.0,)))
    assert found["turns"] == (1.0, 2)
    assert "answer_seconds" not in found


def test_the_seconds_of_an_answer_are_a_mean_over_answers():
    ends = PlayEnd(0, 1.0, (0.0,) * 2, answers=1, answer_seconds=0.5), PlayEnd(1, 1.0, (0.0,) * 4, answers=3)
    assert means(*ends)["answer_seconds"] == (0.125, 4)
