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


def test_a_call_has_a_limited_number_of_names_and_says_how_many_it_leaves_out():
    """Names may differ by row. Those that are kept do not depend on the order of the rows."""
    ends = [PlayEnd(row, 1.0, (0.0,), numbers={f"room {row:03}": 1.0}) for row in range(300)]
    found = means(*ends)
    assert found == means(*reversed(ends))
    kept = [name for name in found if name.startswith("play/room")]
    assert kept == [f"play/room {row:03}" for row in range(256)]
    assert found["play/names_left_out"] == (44.0, 300)
    assert "play/names_left_out" not in means(*ends[:256])
