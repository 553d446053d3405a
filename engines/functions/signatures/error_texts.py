"""Error texts for the model and others: the error itself, without secrets of the environment or the arguments."""

from __future__ import annotations

import json
import os
import re
from asyncio import CancelledError
from collections.abc import Callable, Iterator
from contextlib import suppress
from urllib.parse import parse_qsl, unquote, urlsplit

from prefect_rlhf.engines.functions.signatures.play_function import PlayFunction
from prefect_rlhf.errors.blame import described, own_place

MOST_OF_AN_ERROR = 300
"""Characters of an error that the model reads."""
_SHORTEST_SECRET = 4
_ADDRESS = re.compile(r"\b([A-Za-z][A-Za-z0-9+.-]*://)[^\s'\"<>]+")
_PATH = re.compile(r"(?<![\w.~/])~?/(?:[^\s/'\"<>:,;()\[\]{}]+/)+")
_SECRET_KEY = re.compile(r"^(env|headers?)$|key|token|secret|passw|credential|auth", re.IGNORECASE)
"""Names of arguments with secret values; `env` is an MCP server's."""


def for_the_model(function: PlayFunction) -> Callable[[BaseException], str] | None:
    """Return a function that tells the model about a tool's error; None if errors make the row fail.

    The model sees the error's type and the first line of its message, only the last part of a path, and only the scheme
    of an address.
    """
    if function.tool_errors == "fail":
        return None
    without_secrets = hiding(function)

    def tell(error: BaseException) -> str:
        text = _PATH.sub("", _ADDRESS.sub(r"\1...", without_secrets(error)))
        return text if len(text) <= MOST_OF_AN_ERROR else f"{text[: MOST_OF_AN_ERROR - 3]}..."

    return tell


def error_answer(why: str) -> str:
    """Return an error as the text of an answer.

    >>> error_answer("a is missing")
    '{"error": "a is missing"}'
    """
    return written(json.dumps({"error": why}, ensure_ascii=False))


def written(text: str) -> str:
    """Return a text with a question mark for each invalid character, because the model may write half of a surrogate
    pair.

    >>> written("a" + chr(0xD800))
    'a?'
    """
    return text.encode(errors="replace").decode()


def hiding(function: PlayFunction) -> Callable[[BaseException | str], str]:
    """Return a function that writes an error (type and first line) or a text without a play's secrets."""

    def write(error: BaseException | str) -> str:
        text = in_a_line(error)
        for secret in sorted(_secrets(function), key=len, reverse=True):
            text = text.replace(secret, "...")
        return text

    return write


def cause(error: BaseException) -> BaseException:
    """Return the first underlying error of a group, or the error itself.

    >>> cause(ExceptionGroup("a group", [ExceptionGroup("another", [KeyError("a")])]))
    KeyError('a')
    """
    while isinstance(error, BaseExceptionGroup):  # tasks that an error ended are in it too
        error = min(error.exceptions, key=lambda each: isinstance(each, CancelledError))
    return error


def in_a_line(error: BaseException | str) -> str:
    """Return an error's type and the first line of its message, without its place; a text unchanged."""
    if isinstance(error, str):
        return error
    error = cause(error)
    try:
        place = own_place(error)
        return described(error).removesuffix(f" ({place})")
    except Exception:  # noqa: BLE001  the text of a foreign error may itself raise
        return type(error).__name__


def _secrets(function: PlayFunction) -> set[str]:
    """Return the values of the variables that a play was given, and the secrets in its arguments."""
    values = {os.environ.get(name, "") for name in function.environment_variables}
    values |= set(_secrets_in(function.keywords, is_secret=False))
    return {value for value in values if len(value) >= _SHORTEST_SECRET}


def _secrets_in(value: object, *, is_secret: bool) -> Iterator[str]:
    """Yield the texts in a JSON value below a key whose values are secrets, and the secrets of addresses."""
    if isinstance(value, str):
        yield from [value] if is_secret else []
        yield from _secrets_of_address(value)
    elif isinstance(value, dict):
        for key, each in value.items():
            yield from _secrets_in(each, is_secret=is_secret or _SECRET_KEY.search(key) is not None)
    elif isinstance(value, list):
        for before, each in zip(["", *value], value, strict=False):  # a flag's value follows it
            yield from _secrets_in(each, is_secret=is_secret or _is_flag_of_secret(before))
            flag, _, of_flag = each.partition("=") if isinstance(each, str) else ("", "", "")
            yield of_flag if _is_flag_of_secret(flag) else ""


def _is_flag_of_secret(argument: object) -> bool:
    is_flag = isinstance(argument, str) and argument.startswith("-") and "=" not in argument
    return is_flag and _SECRET_KEY.search(str(argument)) is not None


def _secrets_of_address(text: str) -> Iterator[str]:
    """Yield the user, the password and the parameters of a URL, as it writes them and as they are meant."""
    with suppress(ValueError):
        address = urlsplit(text)
        if not address.scheme:
            return
        for value in (address.username or "", address.password or ""):
            yield from (value, unquote(value))
        yield address.query
        yield from (value for _, value in parse_qsl(address.query))
        yield from (part.partition("=")[2] for part in address.query.split("&"))
