"""Plays whose model calls Python functions: answers to calls, and every way in which a call can go wrong."""

import asyncio
import json
import re
import subprocess
import sys
import venv
from pathlib import Path

import pytest

from prefect_rlhf.engines.functions.plays.messages import Asks, Failed, Over, Told
from prefect_rlhf.engines.functions.plays.pool import PlayPool
from prefect_rlhf.engines.functions.signatures.load import load_play
from prefect_rlhf.engines.functions.signatures.play_function import PlayFunction
from prefect_rlhf.errors.errors import InvalidInput
from prefect_rlhf.tasks.play import Play

FILE = Path(__file__).parent / "of_tools.py"
ROW = {"prompt": "what is 2 + 3", "answer": "5"}


ALL = (
    *("add", "look_up", "meet", "crash", "leave", "raise_unpicklable"),
    *("give_bytes", "give_much", "give_environment", "lose_file"),
)


def settings(*tools, score="right", **changed):
    fields = {"max_tokens": 64, "deadline_seconds": 60.0, "retries": 0, "signature": "tools"} | changed
    names = [f"{FILE}:{tool}" for tool in tools]
    return Play(function=f"{FILE}:{score}", tools=names, **fields).settings


def call(name, /, **arguments):
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


def talk(pool, turns, row=ROW):
    """Play a row with a model that says these turns; return the end, and the answers to the turns."""
    answers = []
    pool.open([row])
    while True:
        for event in pool.events(5.0):
            if not isinstance(event, Asks):
                return event, answers
            answers += [event.answer] if event.answer is not None else []
            left = (64, pool.settings.max_turns - event.turn - 1)
            pool.tell(Told(0, turns[event.turn], (7,), "stop", left))


@pytest.fixture
def pool_of():
    pools = []

    def make(play):
        pools.append(PlayPool(play))
        return pools[-1]

    yield make
    for pool in pools:
        pool.close()


@pytest.fixture(scope="module")
def pool():
    """A pool with all tools, and few variables of an environment with a secret."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SECRET", "1")
        pool = PlayPool(settings(*ALL, workers=1))
        pool.load()
    yield pool
    pool.close()


@pytest.fixture(scope="module")
def strict_pool():
    """A pool whose rows fail at an error of a tool."""
    pool = PlayPool(settings(*ALL, workers=1, tool_errors="fail"))
    yield pool
    pool.close()


def load(play):
    return asyncio.run(load_play(PlayFunction.of(play)))


def contents(answer):
    assert {message["role"] for message in answer} == {"tool"}
    return [message["content"] for message in answer]


def test_calls_are_answered_and_the_last_turn_is_scored(pool):
    turns = [
        "I add. " + call("add", a=2, b=3),
        call("look_up", word="gut", language="de") + call("add", a=4),
        "It is 5",
    ]
    end, answers = talk(pool, turns)
    assert [contents(answer) for answer in answers] == [["5"], ['{"word": "gut", "language": "de"}', "5"]]
    assert end == Over(0, 1.0, {}, {"tool_calls": 3.0, "bad_calls": 0.0, "tool_errors": 0.0})


def test_calls_of_a_turn_run_concurrently(pool):
    """Each of the two calls waits for the other."""
    _, answers = talk(pool, [call("meet", number=1) + call("meet", number=2), "done"])
    assert contents(answers[0]) == ["met 1", "met 2"]


@pytest.mark.parametrize(
    ("turn", "says"),
    [
        (call("subtract", a=1), "there is no tool 'subtract'; there is add, look_up, "),
        ("<tool_call>{name: add}</tool_call>", 'the call is not valid JSON .*expected {"name": ..., "arguments": '),
        ('<tool_call>{"name": "add"}</tool_call>', "the call has the wrong keys; expected "),
        ('<tool_call>{"name": 3, "arguments": []}</tool_call>', "the call has 3 and .*; expected "),
        ("<tool_call>" + "[" * 100_000, "the call is not valid JSON"),
        (call("add"), "add: a is missing"),
        (call("add", a="2"), "add: a is '2', expected integer"),
        (call("add", a=True), "add: a is True, expected integer"),
        (call("add", a=1, c=2), "add: there is no argument c; there is a, b"),
        (call("look_up", word="a", language="fr"), "look_up: language is 'fr', expected 'en' or 'de'"),
    ],
)
def test_a_bad_call_is_an_answer_for_the_model(pool, turn, says):
    end, (answer,) = talk(pool, [turn, "5"])
    (content,) = contents(answer)
    assert re.search(says, json.loads(content)["error"])
    assert end == Over(0, 1.0, {}, {"tool_calls": 1.0, "bad_calls": 1.0, "tool_errors": 0.0})


@pytest.mark.parametrize(
    ("tool", "error", "reason"),
    [
        ("crash", "LookupError: the index is gone", "LookupError: the index is gone (FILE:n in crash)"),
        ("leave", "SystemExit: 3", "SystemExit: 3 (FILE:n in leave)"),
        (
            "raise_unpicklable",
            "Unpicklable: not to be pickled",
            "Unpicklable: not to be pickled (FILE:n in raise_unpicklable)",
        ),
        (
            "give_bytes",
            r"BadResult: tool give_bytes returned b'\x00' of type bytes, not text or a JSON value",
            r"tool give_bytes returned b'\x00' of type bytes, not text or a JSON value (FILE:n in give_bytes)",
        ),
        (
            "give_much",
            "BadResult: tool give_much returned 10485760 characters, more than 4194304",
            "tool give_much returned 10485760 characters, more than 4194304 (FILE:n in give_much)",
        ),
        (
            "lose_file",
            "FileNotFoundError: [Errno 2] No such file or directory: 'stock.db'",
            "FileNotFoundError: [Errno 2] No such file or directory: '/srv/shop/stock.db' (FILE:n in lose_file)",
        ),
    ],
)
def test_an_error_of_a_tool_is_an_answer_unless_it_is_to_fail_the_row(pool, strict_pool, tool, error, reason):
    """The model reads no path. A row that fails has the tool's file and line."""
    end, (answer,) = talk(pool, [call(tool) + call("add", a=2), "5"])
    assert [json.loads(content) for content in contents(answer)] == [{"error": error}, 3]
    assert end == Over(0, 1.0, {}, {"tool_calls": 2.0, "bad_calls": 0.0, "tool_errors": 1.0})
    end, _ = talk(strict_pool, [call(tool), "5"])
    assert isinstance(end, Failed)
    assert re.sub(rf"{FILE}:\d+", "FILE:n", end.reason) == reason


def test_a_tool_that_hangs_fails_its_row(pool_of):
    end, _ = talk(pool_of(settings("hang", deadline_seconds=2.0)), [call("hang"), "5"])
    assert re.sub(rf"{FILE}:\d+", "FILE:n", end.reason) == "no answer after 2 s (FILE:n in hang)"


def test_of_a_turn_with_very_many_calls_some_run(pool):
    """Each would have a thread of its own. The rest has one answer, and the row goes on."""
    end, (answer,) = talk(pool, [call("add", a=1) * 1500, "5"])
    *results, left = contents(answer)
    assert results == ["2"] * 64
    assert json.loads(left) == {"error": "1436 more calls of this turn did not run; 64 may"}
    assert end == Over(0, 1.0, {}, {"tool_calls": 1500.0, "bad_calls": 1436.0, "tool_errors": 0.0})


def test_half_a_character_in_a_result_is_a_question_mark(pool):
    turn = '<tool_call>{"name": "look_up", "arguments": {"word": "a\\ud800", "language": "en"}}</tool_call>'
    _, (answer,) = talk(pool, [turn, "5"])
    assert contents(answer) == ['{"word": "a?", "language": "en"}']


def test_tools_see_few_environment_variables(pool):
    _, (answer,) = talk(pool, [call("give_environment"), "5"])
    names = json.loads(contents(answer)[0])
    assert "PATH" in names
    assert "SECRET" not in names


def test_calls_in_the_format_of_llama_3_and_a_score_with_a_metric(pool_of):
    turn = '{"name": "add", "parameters": {"a": 2, "b": 3}}'
    end, answers = talk(pool_of(settings("add", score="length", tool_format="llama3")), [turn, "5"])
    assert contents(answers[0]) == ["5"]
    counts = {"tool_calls": 1.0, "bad_calls": 0.0, "tool_errors": 0.0}
    assert end == Over(0, 4.0, {}, counts | {"characters": 1.0})


def test_a_score_does_not_see_the_answer_of_a_dataset(pool_of):
    """Prompts may keep the answer at their end (`last_answer: strip`); the model does not read it either."""
    asked, answer = {"role": "user", "content": "what is 2 + 3"}, {"role": "assistant", "content": "5"}
    end, _ = talk(pool_of(settings("add", score="length")), ["5"], ROW | {"prompt": [asked, answer]})
    assert end.score == 2.0  # messages: the question, and the model's turn


def test_a_score_without_a_number_fails_its_row(pool_of):
    end, _ = talk(pool_of(settings("add", score="no_number")), ["5"])
    assert re.search("returned 'good' of type str as 'score', not a number .* in no_number", end.reason)


@pytest.mark.parametrize(
    ("play", "says"),
    [
        (
            {"tools": ["untyped"]},
            "play.tools: got .*untyped', expected a function with types, and a docstring .*",
        ),
        (
            {"tools": ["undocumented"]},
            "play.tools: got .*expected a function with types, and a docstring .*:\\d+ in undoc",
        ),
        ({"tools": ["takes_all"]}, r"play.tools: got .*expected a function without \*\*arguments"),
        ({"tools": ["ad"]}, "play.tools: got .*:ad', expected a function in .*; it has add"),
        ({"tools": ["add", "add"]}, "play.tools: got 'add', expected tools with names that differ"),
        ({"tools": ["add"], "score": "rite"}, "play.function: got .*:rite', expected a function in .*; it has right"),
    ],
)
def test_a_tool_without_a_schema_is_refused_in_one_line(play, says):
    with pytest.raises(InvalidInput, match=says) as refused:
        load(settings(*play["tools"], score=play.get("score", "right")))
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"signature": "tools", "function": ""}, "play.function: missing; expected a function of a row that scores"),
        ({"signature": "tools"}, "play.tools: missing; expected functions that the model may call"),
        ({"tools": ["a:b"]}, r"play.tools: \('a:b',\) is not used: signature play does not use it; remove it, or set "),
        ({"signature": "tools", "tools": ["a b"]}, "play.tools: got 'a b', expected module:function"),
        ({"arguments": {"a": 1, "b": 2}}, "play.arguments: 'a, b' is not used: signature play does not use it"),
        ({"tool_errors": "fail"}, "play.tool_errors: 'fail' is not used: signature play does not use it; .*or set a "),
        ({"tool_format": "llama3"}, "play.tool_format: 'llama3' is not used: signature play does not use it"),
        ({"signature": "tools", "tools": ["a:b"], "max_turns": 1}, "play.max_turns: got 1, expected at least 2"),
    ],
)
def test_fields_without_effect_are_refused(fields, says):
    with pytest.raises(InvalidInput, match=says):
        Play(**{"function": "a:b", "max_tokens": 8} | fields).settings  # noqa: B018  it checks them


def test_the_worker_needs_the_standard_library_alone(tmp_path, pool_of):
    """In an interpreter without any package: a play runs."""
    venv.create(tmp_path / "bare", symlinks=True)
    python = str(tmp_path / "bare" / "bin" / "python")
    assert subprocess.run([python, "-c", "import pydantic"], capture_output=True, check=False).returncode == 1
    plays = FILE.parent / "of_plays.py"
    play = Play(function=f"{plays}:three_turns", max_tokens=64, python=python).settings
    end, answers = talk(pool_of(play), ["ha", "haha", "hahaha"], {"prompt": "good"})
    assert (answers, end.score) == (["<good2>", "<good4>"], 1.0)
    tools = settings("add", python=python)
    with pytest.raises(InvalidInput, match=f"play.python: got '{python}', expected an interpreter with transformers"):
        pool_of(tools).load()


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (None, r"play.python: got '.*python', expected the path of a Python interpreter \(No such file or directory\)"),
        ("#!/bin/sh\necho no Python here\nexit 2\n", "expected an interpreter that can import .*status 2; its last "),
    ],
)
def test_an_interpreter_that_cannot_run_a_worker_is_refused(tmp_path, pool_of, content, says):
    python = tmp_path / "python"
    if content is not None:
        python.write_text(content)
        python.chmod(0o755)
    with pytest.raises(InvalidInput, match=says):
        pool_of(settings("add", python=str(python))).load()


def test_the_packages_of_this_interpreter_are_not_on_the_path_of_another(tmp_path, pool_of):
    venv.create(tmp_path / "bare", symlinks=True)
    file = tmp_path / "paths.py"
    file.write_text(
        "import sys\nasync def play(row, say):\n    await say()\n    return float(row['here'] in sys.path)\n"
    )
    play = Play(function=f"{file}:play", max_tokens=8, python=str(tmp_path / "bare" / "bin" / "python")).settings
    here = next(folder for folder in sys.path if folder.endswith("site-packages"))
    end, _ = talk(pool_of(play), ["a"], {"prompt": "", "here": here})
    assert end.score == 0.0
