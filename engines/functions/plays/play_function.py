"""A person's play: the name of its coroutine function."""

from __future__ import annotations

from dataclasses import dataclass

from prefect_rlhf.engines.functions.function import NamedFunction


@dataclass(frozen=True, slots=True)
class PlayFunction(NamedFunction):
    """A coroutine function `async def play(row, say)`, called once for each row. `Play` states the bounds.

    `function` is `"module:function"` or `"path/to/file.py:function"`.
    """

    function: str

    def __post_init__(self) -> None:
        self.check()

    @property
    def field(self) -> str:
        """The field that errors name."""
        return "play.function"
