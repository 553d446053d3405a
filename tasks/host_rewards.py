"""Rewards by Python functions, as user settings: the functions, their weights, and their execution."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, StringConstraints, model_validator

from prefect_rlhf.engines.functions.function import START_SECONDS, HostFunction, HostSettings
from prefect_rlhf.engines.functions.scores import MOST_SCORE
from prefect_rlhf.engines.rows import keys_of_calls
from prefect_rlhf.errors.errors import InvalidInput
from prefect_rlhf.errors.wrong_setting import not_used, wrong
from prefect_rlhf.files.path_text import PathText, resolved
from prefect_rlhf.tasks.settings import Settings

_COMPUTATIONS = (
    "advantages",
    "returns",
    "rewards",
    "row_weights",
    "group_tokens",
    "group_rows",
    "importance",
)

Name = Annotated[str, StringConstraints(pattern=r"^[A-Za-z_]\w*$", max_length=200)]


class RewardFunction(Settings):
    """A function that scores a row. `HostFunction` says how each signature is called."""

    function: PathText = Field(description="`module:function` or `file.py:function`, such as `my_rewards:exact`.")
    weight: float = Field(1.0, ge=-1e6, le=1e6, description="Weight of its result in the sum.")
    signature: Literal["row", "trl", "verl", "reasoning_gym"] = Field(
        "row", description="How the function is called: with a row, or as TRL, verl or reasoning-gym call it."
    )
    try_first: bool = Field(
        True, description="Call it on a few rows with made-up responses before the run; set false if calls cost money."
    )


class HostRewards(Settings):
    """Python functions that score rows, in worker processes on the node's CPUs.

    >>> HostRewards(functions={"exact": RewardFunction(function="my_rewards:exact")}).host_functions[0].name
    'exact'
    """

    functions: dict[Name, RewardFunction] = Field(
        min_length=1, max_length=64, description="Your functions, each under a name that its result gets."
    )
    workers: int = Field(2, ge=1, le=1024, description="Worker processes, each on a CPU.")
    deadline_seconds: float = Field(30.0, gt=0, le=86400, description="Time limit for a row, in seconds.")
    start_seconds: float = Field(
        START_SECONDS, gt=0, le=86400, description="Time limit for a worker to import the functions, in seconds."
    )
    retries: int = Field(1, ge=0, le=100, description="How often a failed row is tried again.")
    failed_value: float | None = Field(
        None, ge=-MOST_SCORE, le=MOST_SCORE, description="Score for a failed row; empty: the row is left out."
    )
    most_failed: float = Field(
        0.1, ge=0, le=1, description="Share of a step's rows that may fail; a larger share ends the run."
    )
    seconds_per_row: float = Field(
        0.001,
        ge=0,
        le=86400,
        description="For the planner: how long you expect a row to take in all functions together, in seconds.",
    )

    @model_validator(mode="before")
    @classmethod
    def _has_no_model(cls, given: Any) -> Any:
        """Refuse a model's key beside the functions."""
        if isinstance(given, dict) and "path" in given:
            raise not_used("path", "reward.functions score the responses", "remove functions for a reward model")
        return given

    @model_validator(mode="after")
    def _value_of_failed_is_a_score(self) -> HostRewards:
        """Refuse a value of failed rows that the weights carry beyond the bound of scores."""
        heaviest = max(abs(function.weight) for function in self.functions.values())
        if abs(self.failed_value or 0.0) * heaviest > MOST_SCORE:
            right = f"at most {MOST_SCORE / heaviest:g} in size, since a weight is {heaviest:g}"
            raise wrong(self, "failed_value", right)
        return self

    @property
    def host_functions(self) -> tuple[HostFunction, ...]:
        """The functions in the pool's form. Raises InvalidInput for a function named like a key of the rows."""
        for name in self.functions:
            if name in {*keys_of_calls(), *_COMPUTATIONS}:
                raise InvalidInput("reward.functions", name, "another name: rows already have a key of this name")
        return tuple(
            HostFunction(name, stated.function, stated.weight, stated.signature)
            for name, stated in self.functions.items()
        )

    def absolute(self) -> HostRewards:
        """Return the same settings with absolute paths, since ranks and workers may run in other folders."""
        functions = {}
        for name, stated in self.functions.items():
            file, colon, function = stated.function.rpartition(":")
            if file.endswith(".py"):
                file = str(resolved(Path(file)))
            functions[name] = stated.model_copy(update={"function": f"{file}{colon}{function}"})
        return self.model_copy(update={"functions": functions})

    @property
    def host_settings(self) -> HostSettings:
        """The pool's settings."""
        return HostSettings(**{name: getattr(self, name) for name in HostSettings.__dataclass_fields__})

    @property
    def outputs(self) -> tuple[str, ...]:
        """The keys of the result: `scores` and, with several functions, each function's name."""
        return ("scores", *self.functions) if len(self.functions) > 1 else ("scores",)
