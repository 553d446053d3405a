"""A loaded play as a worker runs it, and the reason why a play failed."""

from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

MOST_CHARACTERS = 1 << 22
"""Longest answer; a longer answer fails its play."""


class PlayFailed(Exception):  # noqa: N818  the reason of a play's failure, not an error of ours
    """Why a play failed: one line, with the place."""


class Turn(Protocol):
    """A turn of the model; see `Said`."""

    @property
    def text(self) -> str: ...

    @property
    def end(self) -> str: ...

    @property
    def turn(self) -> int: ...


class Model(Protocol):
    """The model, as a play sees it; see `Say`."""

    async def __call__(self, answer: object = None) -> Turn: ...

    def reward(self, value: float) -> None: ...


Play = Callable[[Mapping[str, Any], Model], Awaitable[object]]


@dataclass(frozen=True, slots=True)
class LoadedPlay:
    """A play, its `file:line in function`, and the tool schemas that prompts show, as JSON values."""

    play: Play
    place: str
    schemas: Sequence[Mapping[str, Any]] = ()
