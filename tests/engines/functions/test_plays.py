"""The pool of plays: what plays are told, and every way in which a play can fail without others."""

import re
from pathlib import Path

import pytest

from prefect_rlhf.engines.functions.plays.messages import Asks, Failed, Over, Told
from prefect_rlhf.engines.functions.plays.pool import PlayPool
from prefect_rlhf.errors.errors import InvalidInput
from prefect_rlhf.tasks.play import Play

FILE = Path(__file__).parent / "of_plays.py"
ROWS = [{"prompt": "good"}, {"prompt": "bad"}, {"prompt": "fine"}]


def settings(name, **changed):
    return Play(function=f"{FILE}:{name}", **{"max_tokens": 64, "deadline_seconds": 60.0} | changed).settings


def played(pool, rows):
    """Run plays to their ends with a model that counts its turns; return each row's end, and all questions."""
    pool.open(rows)
    ends, asked = {}, []
    while len(ends) < len(rows):
        for event in pool.events(5.0):
            if isinstance(event, Asks):
                asked.append(event)
                left = 64 - event.turn, pool.settings.max_turns - event.turn - 1
                end = "budget" if event.turn >= pool.settings.max_turns else "stop"
                pool.tell(
                    Told(event.play, "ha" * (event.turn + 1) * (end == "stop"), (7,) * (end == "stop"), end, left)
                )
            else:
                ends[event.play] = event
    return [ends[number] for number in range(len(rows))], asked


@pytest.fixture
def pool_of():
    pools = []

    def make(name, **changed):
        pools.append(PlayPool(settings(name, **changed)))
        return pools[-1]

    yield make
    for pool in pools:
        pool.close()


def test_a_play_hears_the_turns_it_asks_for(pool_of):
    pool = pool_of("three_turns")
    for _ in range(2):  # a pool serves several calls
        ends, asked = played(pool, ROWS)
        assert ends == [Over(number, 1.0, {0: 2.0, 1: 4.0}, {"turns": 3.0}) for number in range(3)]
        assert [event.answer for event in asked if event.play == 1] == [None, "<bad2>", "<bad4>"]


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("raises", "LookupError: no such tool (FILE:n in raises)"),
        ("hangs", "no answer after 1 s (FILE:n in hangs)"),
        ("blocks", "no answer after 1 s, and its process did not end it (FILE:n in blocks)"),
        ("exits", "its process ended with status 3 (FILE:n in exits)"),
        ("leaves", "SystemExit: tired (FILE:n in leaves)"),
        ("not_finite", "returned nan as score, not a finite number (FILE:n in not_finite)"),
        (
            "says_bytes",
            "TypeError: say got b'\\x00' of type bytes; it takes text, a message {role, content}, or a list",
        ),
        (
            "endless_answer",
            "ValueError: say got an answer of 10485760 characters, expected at most 4194304 (FILE:n in",
        ),
        ("unpicklable", "Unpicklable: not to be pickled (FILE:n in unpicklable)"),
        ("silent", "it returned before its first say (FILE:n in silent)"),
        ("never_speaks", "no answer after 1 s (FILE:n in never_speaks)"),
        ("ends_before_a_turn", "LookupError: no such level (FILE:n in ends_before_a_turn)"),
        ("loops_stubbornly", "no answer after 1 s (FILE:n in loops_stubbornly)"),
        ("asks_wrongly", "no answer after 1 s (FILE:n in asks_wrongly)"),
        ("blocks_a_little", "no answer after 1 s"),
        ("returns_late", "no answer after 1 s"),
        ("goes_on_after_its_deadline", "no answer after 1 s (FILE:n in goes_on_after_its_deadline)"),
    ],
)
def test_a_play_that_fails_is_reported_and_others_end(pool_of, name, reason):
    seconds = 1.0 if "after 1 s" in reason else 60.0  # a busy machine may need more than a second for any play
    ends, _ = played(pool_of(name, retries=0, deadline_seconds=seconds), ROWS)
    assert isinstance(ends[1], Failed)
    assert re.sub(rf"{FILE}:\d+", "FILE:n", ends[1].reason).startswith(reason)
    assert [type(end) for end in ends] == [Over, Failed, Over]


def test_plays_of_a_dead_worker_begin_again_without_new_turns(pool_of):
    """All plays share the worker that the bad play ends; each of the others asks the model for its turns only once."""
    rows = [{"prompt": f"good {number}"} for number in range(6)]
    rows[2] = {"prompt": "bad"}
    ends, asked = played(pool_of("exits", workers=1, retries=1), rows)
    assert [type(end) for end in ends] == [Over, Over, Failed, Over, Over, Over]
    assert all(end.score == 1.0 for end in ends if isinstance(end, Over))
    turns = [(event.play, event.turn) for event in asked]
    assert len(turns) == len(set(turns)) == 11


def test_a_play_of_a_dead_worker_is_not_tried_in_a_worker_without_room(pool_of, tmp_path):
    """The other worker has its single play open, which waits for the model when the play of the first dies."""
    (tmp_path / "once").touch()
    pool, heard = pool_of("single_instance", workers=2, at_once=1, retries=1), []
    pool.open([{"prompt": "good", "dies": ""}, {"prompt": "bad", "dies": str(tmp_path / "once")}])
    for count, told in ((2, [(0, 0)]), (3, [(1, 0)]), (4, [(0, 1), (1, 1)]), (6, [])):
        while len(heard) < count:
            heard += pool.events(5.0)
            assert Failed not in map(type, heard)
        for play, turn in told:
            pool.tell(Told(play, "ha", (7,), "stop", (63 - turn, 7 - turn)))
    assert not (tmp_path / "once").exists()
    assert heard[2:4] == [Asks(0, 1, "go on"), Asks(1, 1, "go on")]
    assert [type(event) for event in heard[4:]] == [Over, Over]


def test_a_play_that_is_dropped_while_it_waits_for_a_worker_does_not_begin_again(pool_of, tmp_path):
    """Its worker died after it asked; its answer is refused while the suspect is tried alone."""
    (tmp_path / "once").touch()
    pool, heard = pool_of("dies_once", workers=1, retries=1, deadline_seconds=30.0), []
    pool.open([{"prompt": "good", "dies": ""}, {"prompt": "bad", "dies": str(tmp_path / "once")}])
    for play, count in ((0, 2), (1, 3)):
        while len(heard) < count:
            heard += pool.events(5.0)
        pool.tell(Told(play, "ha", (7,), "stop", (63, 7)))
    while pool.has_begun(0):
        heard += pool.events(5.0)
    pool.drop(0)
    for turn in (1, 2):
        while heard[-1] != Asks(1, turn, "bad"):
            heard += pool.events(5.0)
        pool.tell(Told(1, "ha", (7,), "stop", (63 - turn, 7 - turn)))
    while heard[-1] != Over(1, 2.0, {}, {}):
        heard += pool.events(5.0)


def test_a_play_beyond_its_turns_hears_that_at_once(pool_of):
    ends, _ = played(pool_of("without_end", max_turns=3), ROWS)
    assert [end.score for end in ends] == [2.0, 2.0, 2.0]


def test_a_play_that_loops_beyond_its_budget_fails_at_its_second_call_and_no_worker_ends(pool_of):
    pool = pool_of("loops", workers=1, max_turns=3, retries=0)
    pool.load()
    (process,) = (hand.process for hand in pool._hands)
    for bad in range(3):
        rows = [{"prompt": "bad" if row == bad else "good"} for row in range(3)]
        ends, _ = played(pool, rows)
        assert [isinstance(end, Failed) for end in ends] == [row == bad for row in range(3)]
        assert re.sub(rf"{FILE}:\d+", "FILE:n", ends[bad].reason) == (
            "RuntimeError: say was called again beyond the row's budget, 64 tokens (play.max_tokens) and 3 turns"
            ' (play.max_turns); return when said.end is "budget" (FILE:n in loops)'
        )
    assert [hand.process for hand in pool._hands] == [process] and not process.ended()


def test_a_play_sees_only_the_environment_variables_that_it_is_given(pool_of, monkeypatch):
    monkeypatch.setenv("SECRET", "1")
    monkeypatch.setenv("ALLOWED", "1")
    ends, _ = played(pool_of("sees_environment", environment_variables=("ALLOWED",)), ROWS[:1])
    assert ends[0].numbers == {"secrets": 0.0, "allowed": 1.0}


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("three_turn", "got '.*three_turn', expected a function in .*of_plays.py; it has three_turns"),
        (
            "not_async",
            r"got .*, expected a coroutine function: async def play\(row, say\) \(.*of_plays.py:\d+ in not_async\)",
        ),
        ("no_say", "got .*, expected a coroutine function: .* in no_say.*too many positional arguments"),
    ],
)
def test_a_function_without_the_play_signature_is_refused_in_one_line(pool_of, name, says):
    with pytest.raises(InvalidInput, match=f"play.function: {says}") as refused:
        pool_of(name).load()
    assert "\n" not in str(refused.value)


def test_a_worker_whose_parent_was_stopped_ends_without_a_wait(pool_of, caplog):
    """The pool would wait ten seconds, and then say that the process did not end."""
    ends, _ = played(pool_of("stops_its_parent", retries=0, deadline_seconds=10.0), ROWS)
    assert [type(end) for end in ends] == [Over, Failed, Over]
    assert not caplog.records
