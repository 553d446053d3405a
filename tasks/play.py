"""Plays, as user settings: the coroutine that talks with the model, its bounds, and its execution."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field, StringConstraints

from prefect_rlhf.engines.engine import PlaySettings
from prefect_rlhf.engines.functions.plays.play_function import PlayFunction
from prefect_rlhf.placement.graph import PlayBounds
from prefect_rlhf.tasks.settings import Settings

VariableName = Annotated[str, StringConstraints(pattern=r"^[A-Za-z_]\w*$", max_length=200)]


class Play(Settings):
    """A coroutine that plays a row with the model: `async def play(row, say)`, run in worker processes.

    >>> Play(function="my_play:solve", max_tokens=256).bounds.max_turns
    8
    """

    function: str = Field(
        max_length=4096, description="`module:function` or `file.py:function`, such as `my_play.py:solve`."
    )
    max_tokens: int = Field(ge=1, le=1 << 20, description="Most tokens after the prompt, including those of answers.")
    max_turns: int = Field(8, ge=1, le=1000, description="Most turns of the model in a row.")
    max_answer_tokens: int = Field(1024, ge=1, le=1 << 20, description="Most tokens of an answer of the environment.")
    overlong_answers: Literal["refuse", "keep_start", "keep_end"] = Field(
        "keep_start", description="Longer answers: the row fails, or the answer's start or end is kept."
    )
    workers: int = Field(2, ge=1, le=1024, description="Worker processes for each replica that generates.")
    at_once: int = Field(64, ge=1, le=4096, description="Plays that a worker has open.")
    deadline_seconds: float = Field(30.0, gt=0, le=86400, description="Longest time of an answer, in seconds.")
    play_seconds: float = Field(
        3600.0, gt=0, le=86400, description="Longest time of all answers of a row together, in seconds."
    )
    retries: int = Field(1, ge=0, le=100, description="Further tries of a play that failed.")
    failed_value: float | None = Field(
        None, ge=-1e9, le=1e9, description="Score of a row whose play failed; empty: the row is left out."
    )
    most_failed: float = Field(
        0.1, ge=0, le=1, description="Share of a replica's plays that may fail; a larger share ends the run."
    )
    environment_variables: tuple[VariableName, ...] = Field(
        (), strict=False, max_length=64, description="Names of further environment variables that the workers get."
    )
    expected_turns: float = Field(3.0, ge=1, le=1000, description="Expected turns of a row, for the planner.")
    expected_answer_tokens: float = Field(
        100.0, ge=0, le=1 << 20, description="Expected tokens of an answer, for the planner."
    )
    seconds_per_answer: float = Field(
        0.05, ge=0, le=86400, description="Expected seconds that a row waits for an answer, for the planner."
    )

    def absolute(self) -> Play:
        """Return the same settings with an absolute path, because ranks and workers may run in other folders."""
        file, colon, function = self.function.rpartition(":")
        if not file.endswith(".py"):
            return self
        return self.model_copy(update={"function": f"{Path(file).expanduser().resolve()}{colon}{function}"})

    @property
    def settings(self) -> PlaySettings:
        """The settings of the pool. Raises InvalidInput for a function's name that has another form."""
        PlayFunction(self.function)  # checks the name
        return PlaySettings(**{name: getattr(self, name) for name in PlaySettings.__dataclass_fields__})

    @property
    def bounds(self) -> PlayBounds:
        """What plans need to know."""
        turns = min(self.expected_turns, self.max_turns)
        observed = min((turns - 1) * min(self.expected_answer_tokens, self.max_answer_tokens), self.max_tokens / 2)
        return PlayBounds(
            self.model_dump_json(), self.max_tokens, self.max_turns, turns, observed, self.seconds_per_answer
        )
