"""Words of a task whose length is in its prompt: to count down from a number. `countdown_model.py` makes the model.

It imports nothing, because processes of rewards import it.
"""

from __future__ import annotations

from typing import Any

SPECIAL = ("<unk>", "<s>", "</s>")
END = SPECIAL.index("</s>")
WORDS = "abcd"
"""Suffixes of the words of a number."""


def vocabulary(most: int) -> list[str]:
    """Return the words of all numbers up to `most`, after the special words."""
    return [*SPECIAL, *(f"{number}{suffix}" for number in range(1, most + 1) for suffix in WORDS)]


def tokens(number: int) -> slice:
    """Return the ids of the words of a number, from 1 on."""
    first = len(SPECIAL) + (number - 1) * len(WORDS)
    return slice(first, first + len(WORDS))


def prompt(length: int) -> str:
    """Return a prompt whose response has so many tokens."""
    return f"{length}{WORDS[0]}"


def first_words(completions: list[str], **_: Any) -> list[float]:
    """Score each response by its share of first words of a number, as TRL calls a reward."""
    return [text.count(WORDS[0]) / max(1, len(text.split())) for text in completions]
