"""Messages of a worker with plays: pickles to the worker, lines of JSON back.

The pool opens a play for a row. The play asks for a turn of the model, with its answer to the previous turn, and is
told what the model said, until it is over. A worker's messages are never unpickled.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from prefect_rlhf.engines.functions.messages import exactly, finite, parsed
from prefect_rlhf.engines.functions.plays.bounds import AnswerBounds, check_numbers, check_rewards
from prefect_rlhf.engines.functions.signatures.play_function import PlayFunction

Answer = str | list[dict[str, str]]
"""Text, or messages with role and content."""
End = Literal["stop", "length", "budget"]


@dataclass(frozen=True, slots=True)
class Begin:
    """The first message to a worker. `path` is searched for modules; the limits are of PlaySettings."""

    function: PlayFunction
    path: tuple[str, ...]
    deadline_seconds: float
    play_seconds: float
    answers: AnswerBounds


@dataclass(frozen=True, slots=True)
class Open:
    """Begin the play of a row; `play` is its number, `left` the tokens and turns that the row may have."""

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
    """End a play that is not over; it says nothing more."""

    play: int


@dataclass(frozen=True, slots=True)
class Ready:
    """The play is imported: its `file:line in function`, and the schemas of tools that prompts show."""

    place: str
    schemas: tuple[Mapping[str, Any], ...] = ()


@dataclass(frozen=True, slots=True)
class Refused:
    """The play cannot be used: the field of its settings, the value seen, and the expected value."""

    field: str
    seen: str
    expected: str


@dataclass(frozen=True, slots=True)
class Asks:
    """A play asks for turn number `turn`, after an `answer` to the turn before; the first turn has none."""

    play: int
    turn: int
    answer: Answer | None


@dataclass(frozen=True, slots=True)
class Over:
    """A play has returned: a score (None: not applicable), rewards of turns by number, and other numbers by name.

    `cut`: it asked for a turn beyond its tokens or turns.
    """

    play: int
    score: float | None
    rewards: Mapping[int, float]
    numbers: Mapping[str, float]
    cut: bool = False


@dataclass(frozen=True, slots=True)
class Failed:
    """A play has failed, in one line."""

    play: int
    reason: str


Said = Ready | Refused | Asks | Over | Failed


def said_in(line: bytes) -> Said:
    """Read such a line. Raises ValueError for another line: a person's code may write to the same socket.

    >>> from prefect_rlhf.engines.functions.messages import line_of
    >>> said_in(line_of(Over(3, 1.0, {0: 0.5}, {}))) == Over(3, 1.0, {0: 0.5}, {})
    True
    """
    return parsed(line, _READ)


def as_answer(value: object) -> Answer:
    """Return an answer in its plain form. Raises TypeError for a value that is neither text nor messages."""
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


def _ready(place: str, schemas: list[dict[str, Any]]) -> Ready:
    return Ready(exactly(str, place), tuple(exactly(dict, schema) for schema in exactly(list, schemas)))


def _refused(field: str, seen: str, expected: str) -> Refused:
    return Refused(exactly(str, field), exactly(str, seen), exactly(str, expected))


def _asks(play: int, turn: int, answer: Any) -> Asks:
    return Asks(exactly(int, play), exactly(int, turn), None if answer is None else as_answer(answer))


def _over(play: int, score: float | None, rewards: dict[str, float], numbers: dict[str, float], cut: bool) -> Over:
    over = Over(
        exactly(int, play),
        None if score is None else finite(score),
        {int(turn): finite(reward) for turn, reward in exactly(dict, rewards).items()},
        {name: finite(number) for name, number in exactly(dict, numbers).items()},
        exactly(bool, cut),
    )
    check_rewards(over.score, over.rewards)
    check_numbers(over.numbers)
    return over


def _failed(play: int, reason: str) -> Failed:
    return Failed(exactly(int, play), exactly(str, reason))


_READ: Mapping[str, Callable[..., Said]] = {
    "Ready": _ready,
    "Refused": _refused,
    "Asks": _asks,
    "Over": _over,
    "Failed": _failed,
}
