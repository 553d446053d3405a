"""Bounds on everything that a play sends: rewards and scores, other numbers and their names, the size of an answer.

A worker checks them before it sends, and the pool when it reads. A row beyond a bound fails, with a reason that names
the bound.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate

from prefect_rlhf.engines.functions.scores import (
    LONGEST_NAME,
    MOST_NUMBER,
    MOST_NUMBERS,
    MOST_SCORE,
    SCORES,
    wrong_names,
)
from prefect_rlhf.engines.functions.signatures.loaded import MOST_CHARACTERS

MOST_MESSAGES = 1024
"""Messages of an answer."""
_CHARACTERS_A_TOKEN = 256  # no vocabulary that we know has a longer token


def check_rewards(score: float | None, rewards: Mapping[int, float]) -> None:
    """Raise ValueError if the score, or a sum of turns' rewards and score up to the end, exceeds the bound on scores.

    >>> check_rewards(1e9, {0: -1e9})
    >>> check_rewards(1e9, {0: 1.0})
    Traceback (most recent call last):
    ...
    ValueError: its score and the rewards of its turns sum to 1000000001, expected a number from -1e+09 to 1e+09
    """
    if score is not None and not abs(score) <= MOST_SCORE:
        raise ValueError(f"returned {score:.10g} as score, expected {SCORES}")
    for turn, reward in rewards.items():
        if not abs(reward) <= MOST_SCORE:
            raise ValueError(f"the rewards of turn {turn} sum to {reward:.10g}, expected {SCORES}")
    backwards = (rewards[turn] for turn in sorted(rewards, reverse=True))
    for total in accumulate(backwards, initial=score or 0.0):
        if not abs(total) <= MOST_SCORE:
            raise ValueError(f"its score and the rewards of its turns sum to {total:.10g}, expected {SCORES}")


def check_numbers(numbers: Mapping[str, float]) -> None:
    """Raise ValueError for too many numbers, for a number that is too large, and for a name that is not a line of text.

    >>> check_numbers({"solved": 1.0})
    >>> check_numbers({"a\\nb": 1.0})
    Traceback (most recent call last):
    ...
    ValueError: returned a number named 'a\\nb', expected a name of 1 to 100 printable characters
    """
    if len(numbers) > MOST_NUMBERS:
        raise ValueError(f"returned {len(numbers)} numbers besides its score, expected at most {MOST_NUMBERS}")
    if wrong := wrong_names(numbers):
        raise ValueError(f"returned {wrong}")
    for name, number in numbers.items():
        if not math.isfinite(number):
            raise ValueError(f"returned {number} as {name}, not a finite number")
        if abs(number) > MOST_NUMBER:
            raise ValueError(f"returned {number:.10g} as {name}, expected at most {MOST_NUMBER:g} in size")


@dataclass(frozen=True, slots=True)
class AnswerBounds:
    """The maximum length of an answer in tokens, and what to do with longer answers, as in PlaySettings.

    The rank makes tokens of answers, so text that certainly exceeds the limit is not sent to it.
    """

    most_tokens: int
    overlong: str

    def shortened(
        self, answer: str | list[dict[str, str]], *, may_end: bool = True
    ) -> str | list[dict[str, str]] | None:
        """Return an answer without the text that certainly exceeds its tokens; None if it ends the play.

        Raises ValueError for an answer beyond a bound, and for an answer that must be refused. An environment's opening
        is refused if it would end the play before it has begun.

        >>> AnswerBounds(1, "keep_start").shortened("x" * 257) == "x" * 256
        True
        """
        messages = [{"role": "", "content": answer}] if isinstance(answer, str) else answer
        _check_messages(messages)
        most = min(self.most_tokens * _CHARACTERS_A_TOKEN, MOST_CHARACTERS)
        length = sum(len(message["content"]) for message in messages)
        if length <= most:
            return answer
        if self.overlong == "end" and may_end:
            return None
        if self.overlong in ("refuse", "end"):
            right = f"at most {self.most_tokens} tokens, play.max_answer_tokens"
            raise ValueError(f"say got an answer of {length} characters, expected {right}")
        texts = _cut([message["content"] for message in messages], most, end=self.overlong == "keep_end")
        if isinstance(answer, str):
            return texts[0]
        return [message | {"content": text} for message, text in zip(messages, texts, strict=True)]


def _check_messages(messages: Sequence[Mapping[str, str]]) -> None:
    """Raise ValueError for too many messages, and for a role or a content that is too long."""
    if len(messages) > MOST_MESSAGES:
        raise ValueError(f"say got an answer of {len(messages)} messages, expected at most {MOST_MESSAGES}")
    for message in messages:
        if len(message["role"]) > LONGEST_NAME:
            length = len(message["role"])
            raise ValueError(f"say got a role of {length} characters, expected at most {LONGEST_NAME}")
        if len(message["content"]) > MOST_CHARACTERS:
            length = len(message["content"])
            raise ValueError(f"say got an answer of {length} characters, expected at most {MOST_CHARACTERS}")


def _cut(texts: Sequence[str], most: int, end: bool) -> list[str]:
    """Return the texts, cut to `most` characters together: the start of each is kept, or its `end`.

    >>> _cut(["abc", "def", "g"], 5, end=False), _cut(["abc", "def", "g"], 5, end=True)
    (['abc', 'de', ''], ['abc', 'ef', ''])
    """
    kept, left = [], most
    for text in texts:
        kept.append(text if len(text) <= left else text[len(text) - left :] if end else text[:left])
        left -= len(kept[-1])
    return kept
