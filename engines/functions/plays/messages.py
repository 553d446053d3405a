"""The messages between a pool and its workers with plays.

The pool opens a play for a row. The play asks for a turn of the model, with its answer to the previous turn, and is
told what the model said, until it ends.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from prefect_rlhf.engines.functions.message import Message, Refused
from prefect_rlhf.engines.functions.plays.bounds import AnswerBounds, check_numbers, check_rewards
from prefect_rlhf.engines.functions.signatures.play_function import PlayFunction

Answer = str | list[dict[str, str]]
"""Text, or messages with role and content."""
End = Literal["stop", "length", "budget"]


@dataclass(frozen=True, slots=True)
class Begin:
    """The first message to a worker. `path` is searched for modules; the limits are those of PlaySettings."""

    function: PlayFunction
    path: tuple[str, ...]
    deadline_seconds: float
    play_seconds: float
    answers: AnswerBounds


@dataclass(frozen=True, slots=True)
class Open:
    """Begin a row's play; `play` is its number, `left` the tokens and turns that the row may have."""

    play: int
    row: Mapping[str, Any]
    left: tuple[int, int]


@dataclass(frozen=True, slots=True)
class Told:
    """The model's turn that a play asked for. `left` are the tokens and turns that the row may still have."""

    play: int
    text: str
    tokens: tuple[int, ...]
    end: End
    left: tuple[int, int]


@dataclass(frozen=True, slots=True)
class Close:
    """End a play early; it sends no more messages."""

    play: int


@dataclass(frozen=True, slots=True)
class Ready(Message):
    """The play is imported: its `file:line in function`, and the tool schemas that prompts show."""

    place: str
    schemas: tuple[Mapping[str, Any], ...] = ()


@dataclass(frozen=True, slots=True)
class Asks(Message):
    """A play asks for turn number `turn`, with its `answer` to the previous turn; the first turn has no answer."""

    play: int
    turn: int
    answer: Answer | None

    def __post_init__(self) -> None:
        if self.answer is not None:
            as_answer(self.answer)


@dataclass(frozen=True, slots=True)
class Over(Message):
    """A play has returned: a score (None: not applicable), rewards by turn number, and other numbers by name.

    `cut` says that it asked for a turn beyond its tokens or turns. Raises ValueError for a number or a name beyond its
    bound.
    """

    play: int
    score: float | None
    rewards: Mapping[int, float]
    numbers: Mapping[str, float]
    cut: bool = False

    def __post_init__(self) -> None:
        check_rewards(self.score, self.rewards)
        check_numbers(self.numbers)


@dataclass(frozen=True, slots=True)
class Failed(Message):
    """A play has failed, with the reason in one line."""

    play: int
    reason: str


Said = Ready | Refused | Asks | Over | Failed


def as_answer(value: object) -> Answer:
    """Return an answer in its plain form. Raises TypeError unless it is text or messages."""
    if isinstance(value, str):
        return value
    messages = [value] if isinstance(value, Mapping) else value
    if isinstance(messages, list | tuple) and messages and all(map(_is_message, messages)):
        return [dict(each) for each in messages]
    raise TypeError(
        f"say got {value!r:.80} of type {type(value).__name__}; it takes text, a message {{role, content}}, or a list"
        " of messages"
    )


def _is_message(value: object) -> bool:
    return (
        isinstance(value, Mapping)
        and set(value) == {"role", "content"}
        and all(isinstance(part, str) for part in value.values())
    )
