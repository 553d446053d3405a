"""Plays as user settings: the code that talks with the model, its limits, and how it is run."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

from pydantic import Field, JsonValue, StringConstraints, field_validator

from prefect_rlhf.engines.engine import OverlongAnswers, PlaySettings
from prefect_rlhf.engines.functions.function import START_SECONDS
from prefect_rlhf.engines.functions.scores import MOST_SCORE
from prefect_rlhf.engines.functions.signatures.play_function import (
    DEFAULT_ERRORS,
    DEFAULT_FORMAT,
    WITH_MESSAGES,
    WITH_TOOLS,
    PlayFunction,
    PlaySignature,
    ToolErrors,
    ToolFormat,
)
from prefect_rlhf.errors.errors import InvalidInput
from prefect_rlhf.files.path_text import PathText, resolved
from prefect_rlhf.placement.graph import PlayBounds
from prefect_rlhf.tasks.settings import Settings

VariableName = Annotated[str, StringConstraints(pattern=r"^[A-Za-z_]\w*$", max_length=200)]


class Play(Settings):
    """Your code that plays a row with the model, in worker processes: `async def play(row, say)`, or see `signature`.

    | signature | `function` | a row ends |
    |---|---|---|
    | play | `async def play(row, say)` | when it returns a score |
    | tools, mcp | scores a row with `messages` and `response` | at a turn without a call of a tool |
    | environment | a class as in TRL: `reset`, tools and `get_reward` | at a turn without a call of a tool |
    | gymnasium | an id, or a function that makes an environment | when the environment ends it |
    | openenv | a client class; `arguments.base_url` is its server | when the server ends it |

    >>> Play(function="my_play:solve", max_tokens=256).bounds.max_turns
    8
    """

    function: PathText = Field("", description="`module:function` or `file.py:function`, such as `my_play.py:solve`.")
    signature: PlaySignature = Field("play", description="How the function is called, and who answers the model.")
    tools: tuple[PathText, ...] = Field(
        (), strict=False, max_length=128, description="Functions that the model may call, for signature tools."
    )
    tool_format: ToolFormat = Field(DEFAULT_FORMAT, description="How the model writes tool calls.")
    tool_errors: ToolErrors = Field(
        DEFAULT_ERRORS,
        description="If a tool or a step raises an error: the model reads it as an answer, or the row fails.",
    )
    arguments: dict[str, JsonValue] = Field({}, description="Arguments for the environment or the server.")
    python: PathText = Field("", description="Python interpreter for the worker processes; empty: the run's own.")
    max_tokens: int = Field(ge=1, le=1 << 20, description="Most tokens after the prompt, answers included.")
    max_turns: int = Field(8, ge=1, le=1000, description="How often the model may speak in a row.")
    max_answer_tokens: int = Field(1024, ge=1, le=1 << 20, description="Longest answer by the environment, in tokens.")
    overlong_answers: OverlongAnswers = Field(
        "keep_start",
        description="If an answer is longer: the row fails, the answer's start or end is kept, or the play ends.",
    )
    workers: int = Field(2, ge=1, le=1024, description="Worker processes for each generating replica.")
    at_once: int = Field(64, ge=1, le=4096, description="How many plays a worker has open at a time.")
    deadline_seconds: float = Field(30.0, ge=0.001, le=86400, description="Time limit for an answer, in seconds.")
    play_seconds: float = Field(
        3600.0, ge=0.001, le=86400, description="Time limit for all answers in a row together, in seconds."
    )
    start_seconds: float = Field(
        START_SECONDS,
        ge=0.001,
        le=86400,
        description="Time limit for a worker to import the code and to start MCP servers, in seconds.",
    )
    retries: int = Field(1, ge=0, le=100, description="How often a failed play is tried again.")
    failed_value: float | None = Field(
        None,
        ge=-MOST_SCORE,
        le=MOST_SCORE,
        description="Score for a row whose play failed; empty: the row is left out.",
    )
    most_failed: float = Field(
        0.1, ge=0, le=1, description="Share of a replica's plays that may fail; a larger share ends the run."
    )
    environment_variables: tuple[VariableName, ...] = Field(
        (), strict=False, max_length=64, description="Names of environment variables to pass to the workers too."
    )
    together: bool = Field(
        False,
        description="All rows take turns in rounds: slower, but also in bfloat16 the same tokens under one plan, "
        "if workers * at_once is at least the rows of a replica.",
    )
    expected_turns: float = Field(
        3.0, ge=1, le=1000, description="For the planner: how many turns you expect in a row."
    )
    expected_answer_tokens: float = Field(
        100.0, ge=0, le=1 << 20, description="For the planner: how many tokens you expect in an answer."
    )
    seconds_per_answer: float = Field(
        0.05, ge=0, le=86400, description="For the planner: how many seconds you expect a row to wait for an answer."
    )

    @field_validator("environment_variables")
    @classmethod
    def _each_once(cls, names: tuple[str, ...]) -> tuple[str, ...]:
        if len(set(names)) < len(names):
            raise InvalidInput("play.environment_variables", list(names), "each variable once")
        return names

    def absolute(self) -> Play:
        """Return the same settings with absolute paths, since ranks and workers may run in other folders."""
        names: dict[str, object] = {"function": _absolute(self.function), "tools": tuple(map(_absolute, self.tools))}
        names["arguments"] = self._absolute_arguments()
        if self.python:  # not resolved: a link names its environment
            names["python"] = str(Path(self.python).expanduser().absolute())
        return self.model_copy(update=names)

    def _absolute_arguments(self) -> dict[str, JsonValue]:
        """Return the arguments with absolute paths where their meaning is known; an MCP server starts in a folder."""
        arguments = dict(self.arguments)
        action, servers = arguments.get("action"), arguments.get("servers")
        if self.signature == "openenv" and isinstance(action, str):
            arguments["action"] = _absolute(action)
        if self.signature == "mcp" and isinstance(servers, dict):
            arguments["servers"] = {name: _in_folder(server) for name, server in servers.items()}
        return arguments

    @property
    def settings(self) -> PlaySettings:
        """The pool's settings. Raises InvalidInput for names of another form, and for settings without effect."""
        values = {name: getattr(self, name) for name in PlaySettings.__dataclass_fields__}
        settings = PlaySettings(**(values | {"arguments": json.dumps(self.arguments, sort_keys=True)}))
        PlayFunction.of(settings)  # checks names, and the fields of the signature
        if self.shows_tools and self.max_turns < 2:  # noqa: PLR2004  a call and a turn after its answer
            raise InvalidInput("play.max_turns", self.max_turns, "at least 2: a turn with a call, and a turn after it")
        return settings

    @property
    def answers_messages(self) -> bool:
        """Whether the environment answers with messages, which follow the model's turn once it has ended."""
        return self.signature in WITH_MESSAGES

    @property
    def shows_tools(self) -> bool:
        """Whether prompts show schemas of tools."""
        return self.signature in WITH_TOOLS

    @property
    def bounds(self) -> PlayBounds:
        """Limits that plans need to know."""
        turns = min(self.expected_turns, self.max_turns)
        observed = min((turns - 1) * min(self.expected_answer_tokens, self.max_answer_tokens), self.max_tokens / 2)
        return PlayBounds(
            self.model_dump_json(), self.max_tokens, self.max_turns, turns, observed, self.seconds_per_answer
        )


def _in_folder(server: JsonValue) -> JsonValue:
    """Return an MCP server that is a process with the absolute folder in which it starts; another value as it is."""
    if not isinstance(server, dict) or "command" not in server:
        return server
    cwd = server.get("cwd")
    if cwd is not None and not isinstance(cwd, str):
        return server  # refused later
    return server | {"cwd": str(resolved(Path(cwd or ".")))}


def _absolute(name: str) -> str:
    """Return a function's name with an absolute path, if a file is named."""
    file, colon, function = name.rpartition(":")
    return f"{resolved(Path(file))}{colon}{function}" if file.endswith(".py") else name
