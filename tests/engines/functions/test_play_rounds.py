"""Plays in rounds when not every play can be open: rounds go on, and a dead worker changes no round."""

from contextlib import closing
from pathlib import Path

import pytest

from prefect_rlhf.engines.engine import Generated
from prefect_rlhf.engines.functions.plays.pool import PlayPool
from prefect_rlhf.engines.functions.plays.table import Table
from prefect_rlhf.engines.sampling.conversation import in_rounds
from prefect_rlhf.tasks.play import Play

FILE = Path(__file__).parent / "of_plays.py"
ROWS = 6
pytestmark = pytest.mark.timeout(100)  # a round that waits for a play without a worker waits for ever


class LengthCodec:
    """A text is as long as its tokens, which are all 7."""

    def text(self, tokens):
        return "h" * len(tokens)

    def of(self, answer, latest):
        return [7] * len(answer)

    def opened(self, prompt, opening):
        return [*prompt, *self.of(opening, 0)]


def rounds(name, at_once=64, dies="", workers=1, max_turns=8):
    """The rows of plays, and the contexts of each round."""
    bounds = {"max_tokens": 64, "max_turns": max_turns, "deadline_seconds": 60.0}
    settings = Play(function=f"{FILE}:{name}", at_once=at_once, workers=workers, **bounds).settings
    rows = [{"prompt": f"good {number}", "dies": dies if number == 2 else ""} for number in range(ROWS)]
    prompts, contexts = [[1, number] for number in range(ROWS)], []

    def generate(asked, seeds, most):
        contexts.append(sorted(map(tuple, asked)))
        return Generated([[7, 7]] * len(asked), [[0.0, 0.0]] * len(asked)), [True] * len(asked)

    with closing(PlayPool(settings)) as pool:
        table = Table(pool, rows, LengthCodec(), 4, "a test", prompts=prompts)
        said = in_rounds(prompts, range(ROWS), table, lambda orders: orders, generate)
    return said, contexts, table.failures


@pytest.mark.parametrize("at_once", [1, 4])
def test_rounds_go_on_without_the_plays_that_no_worker_has_room_for(at_once):
    said, contexts, failures = rounds("three_turns", at_once)
    whole, together, _ = rounds("three_turns")
    assert not failures and len(together) == 3
    assert len(contexts) > 3
    assert said.tokens == whole.tokens
    assert [end.score for end in said.ends] == [end.score for end in whole.ends] == [5.0] * ROWS


@pytest.mark.parametrize(("workers", "at_once", "sizes"), [(3, 2, [6, 6, 6]), (2, 2, [6, 4, 4, 2, 2])])
def test_the_number_of_workers_changes_no_round_if_each_row_has_room(workers, at_once, sizes):
    """With less room it does: fewer rows go on beside each other."""
    _, contexts, _ = rounds("three_turns", at_once, workers=workers)
    assert list(map(len, contexts)) == sizes


@pytest.mark.parametrize(("at_once", "sizes"), [(64, [6, 6, 6]), (4, [6, 4, 4, 2, 2])])
def test_a_worker_that_dies_changes_no_round(tmp_path, at_once, sizes):
    """Its plays begin again before the next round: the suspect alone, then the others, then plays that never began."""
    (tmp_path / "once").touch()
    said, contexts, failures = rounds("dies_once", at_once, dies=str(tmp_path / "once"))
    assert not (tmp_path / "once").exists()
    whole, together, _ = rounds("dies_once", at_once)
    assert not failures
    assert contexts == together and list(map(len, contexts)) == sizes
    assert said.tokens == whole.tokens and said.ends == whole.ends


def test_plays_that_may_have_killed_a_worker_are_retried_separately(tmp_path):
    (tmp_path / "once").touch()
    said, contexts, failures = rounds("die_together", dies=str(tmp_path / "once"))
    whole, together, _ = rounds("die_together")
    assert not failures and not (tmp_path / "once").exists()
    assert contexts == together and len(contexts) == 3
    assert said.tokens == whole.tokens and said.ends == whole.ends


@pytest.mark.parametrize(("name", "is_cut"), [("three_turns", False), ("without_end", True)])
def test_a_row_is_truncated_if_its_play_asks_for_more_turns_than_it_may_have(name, is_cut):
    """Both have three turns, each of which the model ends itself."""
    said, contexts, _ = rounds(name, max_turns=3)
    assert len(contexts) == 3
    assert [end.truncated for end in said.ends] == [is_cut] * ROWS
