"""What the model reads of an error, and what a log reads: the error, without paths and without secrets."""

import json

import pytest

from prefect_rlhf.engines.functions.signatures.error_texts import for_the_model, hiding
from prefect_rlhf.engines.functions.signatures.play_function import PlayFunction
from prefect_rlhf.tasks.play import Play

pytestmark = pytest.mark.quick

SERVERS = {
    "shop": {"command": "shop", "args": ["--api-key", "of-an-argument", "--token=of-a-flag", "stock.db"]},
    "notes": {"command": "notes", "env": {"LEVEL": "of-the-env"}},
    "far": {"url": "https://me:of-the-password@notes.example/mcp?key=of%20the%20address"},
}


def function(**changed):
    fields = {"signature": "mcp", "arguments": {"servers": SERVERS}, "environment_variables": ("NOTES_TOKEN",)}
    return PlayFunction.of(Play(function="a:b", max_tokens=8, **fields | changed).settings)


class Unreadable(Exception):
    def __str__(self):
        raise RuntimeError("no text")


@pytest.mark.parametrize(
    ("error", "text"),
    [
        (KeyError("12"), "KeyError: '12'"),
        (ValueError("half of 1/2 and/or more, at 3 km/h"), "ValueError: half of 1/2 and/or more, at 3 km/h"),
        (ValueError("first line\nsecond line"), "ValueError: first line"),
        (OSError(2, "No such file", "/home/me/shop/stock.db"), "FileNotFoundError: [Errno 2] No such file: 'stock.db'"),
        (ValueError("in ~/shop/a.py or /srv/b/c.py:12"), "ValueError: in a.py or c.py:12"),
        (ValueError("GET https://shop.example/v1?key=abc failed"), "ValueError: GET https://... failed"),
        (ExceptionGroup("unhandled errors", [ExceptionGroup("again", [KeyError("12")])]), "KeyError: '12'"),
        (ValueError("x" * 1000), "ValueError: " + "x" * 285 + "..."),
        (Unreadable(), "Unreadable"),
    ],
)
def test_the_model_reads_type_and_message_of_an_error_without_paths(error, text):
    tell = for_the_model(function())
    assert tell(error) == text
    try:
        raise error
    except Exception as raised:  # noqa: BLE001  with the place at which it was raised
        assert tell(raised) == text


@pytest.mark.parametrize(
    "secret",
    [
        "of-the-worker",
        "of-an-argument",
        "of-a-flag",
        "of-the-env",
        "of-the-password",
        "of%20the%20address",
        "of the address",
    ],
)
def test_no_error_shows_a_variable_or_a_secret_argument(monkeypatch, secret):
    monkeypatch.setenv("NOTES_TOKEN", "of-the-worker")
    error = ValueError(f"login with {secret} at stock.db failed")
    for write in (for_the_model(function()), hiding(function())):
        assert write(error) == "ValueError: login with ... at stock.db failed"


def test_no_error_is_told_where_it_fails_the_row():
    assert for_the_model(function(tool_errors="fail")) is None


def test_words_of_arguments_that_are_no_secrets_stay_in_errors():
    play = Play(function="a:b", signature="environment", max_tokens=8, arguments={"level": "easy", "api_key": "abcdef"})
    tell = for_the_model(PlayFunction.of(play.settings))
    assert tell(ValueError("no easy level for abcdef")) == "ValueError: no easy level for ..."
    assert json.loads(PlayFunction.of(play.settings).arguments)["level"] == "easy"
