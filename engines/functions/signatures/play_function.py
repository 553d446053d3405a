"""A user's play by name: the code, how it is called, and the interpreter that runs it."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, cast

from prefect_rlhf.engines.functions.function import NamedFunction
from prefect_rlhf.errors.errors import InvalidInput, Missing, NotUsed, UnknownKey

PlaySignature = Literal["play", "tools", "environment", "gymnasium", "openenv", "mcp"]
ToolFormat = Literal["hermes", "llama3"]
ToolErrors = Literal["answer", "fail"]
DEFAULT_FORMAT: ToolFormat = "hermes"
DEFAULT_ERRORS: ToolErrors = "answer"
FORMATS: tuple[ToolFormat, ...] = ("hermes", "llama3")

_FUNCTION: Mapping[PlaySignature, str] = {
    "play": "a coroutine function, such as my_play.py:solve",
    "tools": "a function of a row that scores a conversation, such as my_tools.py:right",
    "environment": "a class with reset, tools and get_reward, such as my_game.py:Game",
    "gymnasium": "an id such as my_envs:Guess-v0, or a function that makes an environment, such as my_envs.py:make",
    "openenv": "a client class, such as echo_env:EchoEnv",
    "mcp": "a function of a row that scores a conversation, such as my_tools.py:right",
}
"""What `function` names, by signature."""
_TOOLS = ("tools",)
_ARGUMENTS = ("environment", "gymnasium", "openenv", "mcp")
SERVERS = "servers by name, each with a command (and args, env, cwd), or a url alone"
_NEEDED_ARGUMENTS: Mapping[str, tuple[str, str]] = {
    "openenv": ("base_url", "the address of the environment's server"),
    "mcp": ("servers", SERVERS),
}
_OF_MCP = ("servers", "stateful")
_GYMNASIUM_ID = re.compile(r"[\w/.:-]+-v\d+")
WITH_TOOLS = ("tools", "environment", "mcp")
"""Signatures whose prompts show the schemas of tools."""
WITH_OPENING = ("environment", "gymnasium", "openenv")
"""Signatures whose environment may add a text to the prompt, before the first turn."""
WITH_MESSAGES = ("tools", "environment", "gymnasium", "openenv", "mcp")
"""Signatures whose answers are messages."""


class Named(NamedFunction):
    """A function or class named by a field of a play."""

    __slots__ = ("_field", "function")

    def __init__(self, function: str, field: str = "play.tools") -> None:
        self.function, self._field = function, field
        self.check()

    @property
    def field(self) -> str:
        """The field that errors name."""
        return self._field


@dataclass(frozen=True, slots=True)
class PlayFunction(NamedFunction):
    """A user's play. `Play` documents the meaning and bounds of each field; `arguments` is a JSON object."""

    function: str
    signature: PlaySignature
    tools: tuple[str, ...]
    tool_format: ToolFormat
    tool_errors: ToolErrors
    arguments: str
    python: str
    environment_variables: tuple[str, ...]
    start_seconds: float

    def __post_init__(self) -> None:
        """Raise InvalidInput for a field that the signature lacks or does not use."""
        if not self.function:
            raise Missing("play.function", _FUNCTION[self.signature])
        if not self.is_gymnasium_id:
            self.check()
        for tool in self.tools:
            Named(tool)
        self._check_use("play.tools", self.tools, _TOOLS, "tools of the model")
        self._check_use("play.arguments", ", ".join(self.keywords), _ARGUMENTS, "")  # values may be secrets
        if self.tool_format != DEFAULT_FORMAT and self.signature not in WITH_TOOLS:
            raise NotUsed("play.tool_format", self.tool_format, self._reason, "set a signature with tools")
        if self.tool_errors != DEFAULT_ERRORS and self.signature not in WITH_MESSAGES:
            raise NotUsed("play.tool_errors", self.tool_errors, self._reason, "set a signature with tools")
        if self.signature in _TOOLS and not self.tools:
            raise Missing("play.tools", "functions that the model may call, such as my_tools.py:search")
        name, right = _NEEDED_ARGUMENTS.get(self.signature, ("", ""))
        if name and not self.keywords.get(name):
            raise Missing(f"play.arguments.{name}", right)
        if self.signature == "mcp":
            self._check_of_mcp()

    @classmethod
    def of(cls, settings: object) -> PlayFunction:
        """Return the play that the settings name."""
        return cls(**{name: getattr(settings, name) for name in cls.__dataclass_fields__})

    @property
    def field(self) -> str:
        """The field that errors name."""
        return "play.function"

    @property
    def is_gymnasium_id(self) -> bool:
        """Whether the name is a Gymnasium id instead of a function."""
        return self.signature == "gymnasium" and _GYMNASIUM_ID.fullmatch(self.function) is not None

    @property
    def keywords(self) -> dict[str, Any]:
        """The arguments as a dict."""
        return cast(dict[str, Any], json.loads(self.arguments))

    @property
    def _reason(self) -> str:
        return f"signature {self.signature} does not use it"

    def _check_of_mcp(self) -> None:
        for key, value in self.keywords.items():
            if key not in _OF_MCP:
                seen = type(value).__name__  # not the value: variables may be secrets
                raise UnknownKey(f"play.arguments.{key}", seen, f"it has {', '.join(_OF_MCP)}")
        servers = self.keywords["servers"]
        for name, server in servers.items() if isinstance(servers, dict) else ():
            cwd = server.get("cwd") if isinstance(server, dict) else None
            if cwd is not None and not isinstance(cwd, str):
                raise InvalidInput(f"play.arguments.servers.{name}.cwd", cwd, "the path of a folder")
        stateful = self.keywords.get("stateful", False)
        if not isinstance(stateful, bool):
            raise InvalidInput("play.arguments.stateful", stateful, "true or false")

    def _check_use(self, field: str, seen: object, users: tuple[str, ...], remedy: str) -> None:
        if seen and self.signature not in users:
            raise NotUsed(field, seen, self._reason, f"set signature: {users[0]}" if users and remedy else "")
