"""A person's play by its names: the code, how it is called, and the interpreter that runs it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, cast

from prefect_rlhf.engines.functions.function import NamedFunction
from prefect_rlhf.errors.errors import Missing, NotUsed

PlaySignature = Literal["play", "tools"]
ToolFormat = Literal["hermes", "llama3"]
DEFAULT_FORMAT: ToolFormat = "hermes"
FORMATS: tuple[ToolFormat, ...] = ("hermes", "llama3")

_FUNCTION: Mapping[PlaySignature, str] = {
    "play": "a coroutine function, such as my_play.py:solve",
    "tools": "a function of a row that scores a conversation, such as my_tools.py:right",
}
"""What `function` names, by signature."""
_TOOLS = ("tools",)
_ARGUMENTS: tuple[str, ...] = ()
WITH_TOOLS = ("tools",)
"""Signatures whose prompts show the schemas of tools."""


class Tool(NamedFunction):
    """A tool by its name."""

    __slots__ = ("function",)

    def __init__(self, function: str) -> None:
        self.function = function
        self.check()

    @property
    def field(self) -> str:
        """The field that errors name."""
        return "play.tools"


@dataclass(frozen=True, slots=True)
class PlayFunction(NamedFunction):
    """A person's play. `Play` states the bounds and the meaning of each field; `arguments` is a JSON object."""

    function: str
    signature: PlaySignature
    tools: tuple[str, ...]
    tool_format: ToolFormat
    arguments: str
    python: str

    def __post_init__(self) -> None:
        """Raise InvalidInput for a field that the signature lacks or does not use."""
        if not self.function:
            raise Missing("play.function", _FUNCTION[self.signature])
        self.check()
        for tool in self.tools:
            Tool(tool)
        self._check_use("play.tools", self.tools, _TOOLS, "tools of the model")
        self._check_use("play.arguments", self.keywords, _ARGUMENTS, "")
        if self.tool_format != DEFAULT_FORMAT and self.signature not in WITH_TOOLS:
            raise NotUsed("play.tool_format", self.tool_format, self._reason, "set a signature with tools")
        if self.signature in _TOOLS and not self.tools:
            raise Missing("play.tools", "functions that the model may call, such as my_tools.py:search")

    @classmethod
    def of(cls, settings: object) -> PlayFunction:
        """Return the play that settings name."""
        return cls(**{name: getattr(settings, name) for name in cls.__dataclass_fields__})

    @property
    def field(self) -> str:
        """The field that errors name."""
        return "play.function"

    @property
    def keywords(self) -> dict[str, Any]:
        """The arguments as a dict."""
        return cast(dict[str, Any], json.loads(self.arguments))

    @property
    def _reason(self) -> str:
        return f"signature {self.signature} does not use it"

    def _check_use(self, field: str, seen: object, users: tuple[str, ...], remedy: str) -> None:
        if seen and self.signature not in users:
            raise NotUsed(field, seen, self._reason, f"set signature: {users[0]}" if users and remedy else "")
