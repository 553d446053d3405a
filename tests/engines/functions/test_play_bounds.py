"""Bounds of what a play says: a row beyond one fails by name, and others go on."""

import re
from pathlib import Path

import pytest
from test_plays import played, settings

from prefect_rlhf.engines.functions.plays.bounds import AnswerBounds
from prefect_rlhf.engines.functions.plays.hand import read
from prefect_rlhf.engines.functions.plays.messages import Failed, Over
from prefect_rlhf.engines.functions.plays.pool import PlayPool
from prefect_rlhf.engines.sampling.answer_tokens import AnswerTokens
from tests.tasks.small_tokenizer import save_small_tokenizer

FILE = Path(__file__).parent / "of_plays.py"


@pytest.fixture(scope="module")
def play():
    """Play rows by the play of a name."""
    pools = {}

    def play(name, rows, **changed):
        if name not in pools:
            pools[name] = PlayPool(settings(name, workers=1, retries=0, deadline_seconds=30.0, **changed))
        return played(pools[name], rows)

    yield play
    for pool in pools.values():
        pool.close()


@pytest.mark.parametrize(
    ("beyond", "reason"),
    [
        ("score", "returned 1000000100 as score, expected a number from -1e+09 to 1e+09"),
        ("far score", "returned 1e+39 as score, expected a number from -1e+09 to 1e+09"),
        ("reward", "ValueError: say.reward got -1e+39, expected a number from -1e+09 to 1e+09"),
        ("rewards", "the rewards of turn 0 sum to 2000000000, expected a number from -1e+09 to 1e+09"),
        ("score and reward", "its score and the rewards of its turns sum to 1000000001, expected a number from -1e+09"),
        ("integer", "OverflowError: int too large to convert to float"),
        ("number", "returned 1e+39 as bytes, expected at most 1e+30 in size"),
        ("numbers", "returned 65 numbers besides its score, expected at most 64"),
        ("long name", "returned a number named 'nnn.*', expected a name of 1 to 100 printable characters"),
        ("odd name", r"returned a number named 'a\\ud800', expected a name of 1 to 100 printable characters"),
    ],
)
def test_a_row_beyond_a_bound_of_numbers_fails_by_name(play, beyond, reason):
    ends, _ = play("goes_beyond", [{"prompt": "fine"}, {"prompt": beyond}])
    assert (ends[0].score, ends[0].numbers["bytes"], len(ends[0].numbers)) == (1e9, 1e30, 64)
    assert isinstance(ends[1], Failed)
    assert re.match(reason.replace("+", r"\+"), ends[1].reason) and f"{FILE}:" in ends[1].reason


def test_the_sum_of_a_rows_rewards_from_any_turn_on_has_the_bound_of_scores(play):
    """Advantages of turns use each such sum; turns beyond it may balance each other in the whole."""
    rewards = [([1e9, -1e9], 0.0), ([-1e9, 1e9, 1e9], -1e9), ([1e9, 1e9], None), ([-5e8, -5e8], -1.0)]
    ends, _ = play("earns_in_turns", [{"rewards": of_turns, "score": score} for of_turns, score in rewards])
    assert [isinstance(end, Failed) for end in ends] == [False, False, True, True]
    assert ends[2].reason.startswith("its score and the rewards of its turns sum to 2000000000, expected ")


@pytest.mark.parametrize(
    ("score", "rewards", "numbers"),
    [
        ("1.7e308", '{"0": 1e308}', "{}"),
        ("null", '{"0": 1e308, "1": 1e308}', "{}"),
        ("1.0", "{}", '{"n": 1e308}'),
        ("1.0", "{}", f'{{"{"n" * 1000}": 1.0}}'),
        ("1.0", '{"0": Infinity}', "{}"),
    ],
)
def test_the_pool_reads_no_end_beyond_a_bound(score, rewards, numbers):
    """A person's code may write to the socket of the results."""
    line = 'Over {"play": 0, "score": %s, "rewards": %s, "numbers": %s, "cut": false}'
    assert read((line % ("1.0", "{}", "{}")).encode()) == Over(0, 1.0, {}, {})
    with pytest.raises(ValueError, match="no message of a worker"):
        read((line % (score, rewards, numbers)).encode())


@pytest.mark.parametrize(
    ("much", "reason"),
    [
        ("messages", "say got an answer of 1025 messages, expected at most 1024"),
        ("role", "say got a role of 101 characters, expected at most 100"),
        ("characters", "say got an answer of 4194305 characters, expected at most 4194304"),
    ],
)
def test_a_row_whose_answer_is_beyond_a_bound_fails_by_name(play, much, reason):
    """An answer at the bounds loses the text that cannot be among its tokens before it is sent to the rank."""
    ends, asked = play("says_much", [{"prompt": "fine"}, {"prompt": much}], max_answer_tokens=2)
    assert [len(message["content"]) for message in asked[-1].answer] == [200, 100, 212, *[0] * 1021]
    assert [type(end) for end in ends] == [Over, Failed]
    assert ends[1].reason.startswith(f"ValueError: {reason} (")


def test_an_answer_is_shortened_to_text_that_its_tokens_may_hold():
    """No token has more than 256 characters. What `overlong_answers` does with a longer answer is done at once."""
    answer = [{"role": "tool", "content": "ab" * 128}, {"role": "tool", "content": "cd" * 128}]
    assert AnswerBounds(2, "refuse").shortened(answer) == answer
    cut = {"keep_start": "12" * 128, "keep_end": "12" * 64 + "34" * 64}
    for overlong, text in cut.items():
        assert AnswerBounds(1, overlong).shortened("12" * 128 + "34" * 64) == text
        messages = AnswerBounds(2, overlong).shortened([answer[0], {"role": "tool", "content": "ef" * 200}, answer[1]])
        assert [len(message["content"]) for message in messages] == [256, 256, 0]
    assert AnswerBounds(1, "end").shortened(answer) is None
    for bounds, may_end in ((AnswerBounds(1, "refuse"), True), (AnswerBounds(1, "end"), False)):
        with pytest.raises(ValueError, match="an answer of 512 characters, expected at most 1 tokens, play.max_ans"):
            bounds.shortened(answer, may_end=may_end)


def test_a_shortened_answer_keeps_the_whole_answers_tokens(tmp_path):
    folder = save_small_tokenizer(tmp_path)
    text = "the best film " + "what is it " * 1000 + "a bad film"
    for overlong in ("keep_start", "keep_end"):
        codec, shorter = AnswerTokens(folder, 3, overlong), AnswerBounds(3, overlong).shortened(text)
        assert len(shorter) == 768
        assert codec.of(shorter, 0) == codec.of(text, 0) != []


def test_an_answer_that_is_too_long_for_its_tokens_ends_the_play_where_that_is_asked_for(play):
    ends, asked = play("without_end_and_long", [{"prompt": ""}], overlong_answers="end", max_answer_tokens=2)
    assert ends == [Over(0, 0.0, {}, {}, cut=True)]
    assert len(asked) == 1
