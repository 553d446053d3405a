"""A play that is over says nothing more: not into another row, not into its own second try, not into the same row."""

import re
from pathlib import Path

import pytest
from test_plays import ROWS, played, settings

from prefect_rlhf.engines.functions.plays.messages import Asks, Failed, Over, Told
from prefect_rlhf.engines.functions.plays.pool import PlayPool

FILE = Path(__file__).parent / "of_plays.py"


@pytest.fixture
def pool_of():
    pools = []

    def make(name, **changed):
        pools.append(PlayPool(settings(name, deadline_seconds=30.0, **changed)))
        return pools[-1]

    yield make
    for pool in pools:
        pool.close()


def test_a_play_that_has_returned_cannot_speak_into_another_row(pool_of):
    """Its say and its rewards are refused; the rows of the next call hear answers to their own questions alone."""
    pool = pool_of("leaves_a_task", workers=1)
    ends, _ = played(pool, [{"prompt": "leaves"}, {"prompt": "leaves"}])
    assert ends == [Over(0, 1.0, {}, {}), Over(1, 1.0, {}, {})]
    ends, asked = played(pool, [{"prompt": "stays"}, {"prompt": "stays"}])
    assert ends == [Over(number, 1.0, {}, {"refused": 4.0}) for number in range(2)]
    assert [event.answer for event in asked if event.turn == 1] == ["own", "own"]


def test_a_play_that_has_failed_cannot_speak_into_its_second_try(pool_of):
    ends, asked = played(pool_of("leaves_a_task_and_fails", workers=1, retries=1), [{"prompt": "good"}])
    assert ends == [Over(0, 1.0, {}, {"refused": 2.0})]
    assert asked == [Asks(0, 0, None), Asks(0, 1, "own")]


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        (
            "returns_while_it_asks",
            "it returned while a call of say waited for the model; await each call (FILE:n in returns_while_it_asks)",
        ),
        (
            "gives_up_on_the_model",
            "RuntimeError: say was called after a call that was cancelled while it waited for the model (FILE:n in",
        ),
        ("writes_lines", "its process said something out of order (FILE:n in writes_lines)"),
        ("writes_an_end", "its process said something out of order (FILE:n in writes_an_end)"),
    ],
)
def test_a_play_that_speaks_out_of_turn_fails_by_name_and_others_end(pool_of, name, reason):
    ends, _ = played(pool_of(name, retries=0, workers=1), ROWS)
    assert [type(end) for end in ends] == [Over, Failed, Over]
    assert re.sub(rf"{FILE}:\d+", "FILE:n", ends[1].reason).startswith(reason)


def test_a_line_for_a_play_that_is_over_is_ignored(pool_of):
    """The worker may send it before it reads that the play was closed."""
    pool = pool_of("writes_for_others", workers=1)
    for _ in range(2):
        ends, asked = played(pool, [{"prompt": "good"}])
        assert ends == [Over(0, 1.0, {}, {})]
        assert len(asked) == 2


def test_a_play_that_was_dropped_may_still_speak_without_harm(pool_of):
    """What it had sent before its worker read of its end costs no other play the worker."""
    pool, heard = pool_of("three_turns", workers=1), []
    pool.open(ROWS)
    while len(heard) < 3:
        heard += pool.events(5.0)
    for row in range(3):
        pool.tell(Told(row, "ha", (7,), "stop", (63, 7)))
    pool.drop(1)
    rows = {0: 1, 2: 1}
    while rows:
        for event in pool.events(5.0):
            if isinstance(event, Over):
                assert rows.pop(event.play) == 3
            else:
                rows[event.play] += 1
                pool.tell(Told(event.play, "ha", (7,), "stop", (63 - event.turn, 7 - event.turn)))
