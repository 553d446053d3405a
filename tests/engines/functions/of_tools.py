"""Tools of a person, good and bad, and the scores of conversations."""

import os
import threading
import time
from typing import Literal

BOTH = threading.Barrier(2, timeout=5)


def add(a: int, b: int = 1) -> int:
    """Add two numbers.

    Args:
        a: The first number.
        b: The second number.
    """
    return a + b


async def look_up(word: str, language: Literal["en", "de"]) -> dict:
    """Look up a word.

    Args:
        word: The word.
        language: Its language.
    """
    return {"word": word, "language": language}


def meet(number: int) -> str:
    """Wait for another call of this tool.

    Args:
        number: The number of the call.
    """
    BOTH.wait()
    return f"met {number}"


def crash() -> str:
    """Raise an error."""
    raise LookupError("the index is gone")


def leave() -> str:
    """Raise what ends a program."""
    raise SystemExit(3)


class Unpicklable(Exception):
    def __reduce__(self):
        raise TypeError("no")


def raise_unpicklable() -> str:
    """Raise an error that cannot be pickled."""
    raise Unpicklable("not to be pickled")


def hang() -> str:
    """Take a minute."""
    time.sleep(60)
    return ""


def give_bytes() -> bytes:
    """Return bytes."""
    return b"\x00"


def give_much() -> str:
    """Return 10 MB."""
    return "x" * 10_485_760


def lose_file() -> str:
    """Raise an error about a file."""
    raise FileNotFoundError(2, "No such file or directory", "/srv/shop/stock.db")


def give_environment() -> list:
    """Return the names of environment variables."""
    return sorted(os.environ)


def untyped(a):
    """Have no types.

    Args:
        a: A value.
    """
    return a


def undocumented(a: int) -> int:
    return a


def takes_all(**values: int) -> int:
    """Take all.

    Args:
        values: The values.
    """
    return len(values)


def right(row):
    """1 if the last turn ends with the answer."""
    assert row["messages"][0]["role"] == "user"
    return float(row["response"].endswith(row["answer"]))


async def length(row):
    """The number of messages, and as a metric the number of characters in tools' answers."""
    answers = [each["content"] for each in row["messages"] if each["role"] == "tool"]
    return {"score": float(len(row["messages"])), "characters": float(sum(map(len, answers)))}


def no_number(row):
    return "good"
