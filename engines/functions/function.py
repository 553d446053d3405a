"""A user's function that is called on rows: its name, its place, its arguments, and the settings of its workers."""

from __future__ import annotations

import math
import re
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from prefect_rlhf.errors.errors import InvalidInput

Signature = Literal["row", "trl", "verl", "reasoning_gym"]
OF_ROWS = ("prompt", "response")
"""Columns that every row has, whatever its dataset."""
_TRUTH = ("ground_truth", "reward_model", "reward_model.ground_truth")
_QUESTION = ("question", "answer", "metadata")
START_SECONDS = 60.0
"""The usual limit for a worker's start."""


class NamedFunction:
    """A user's function by name: `module:function` or `file.py:function`."""

    __slots__ = ()
    function: str

    def check(self) -> None:
        """Raise InvalidInput unless the name has that form."""
        module, _, attribute = self.function.rpartition(":")
        if not module or not all(part.isidentifier() for part in attribute.split(".")):
            raise InvalidInput(self.field, self.function, f"module:function or path/to/file.py:function{self._meant()}")
        if "/" in module and not module.endswith(".py"):
            expected = f"a module, or a file that ends in .py: {module}.py:{attribute}"
            raise InvalidInput(self.field, self.function, expected)

    def _meant(self) -> str:
        """Return a hint at the form that a wrong name means; empty if nobody can know."""
        text = re.sub(r"\(.*\)$", "", self.function.strip("\"'\u201c\u201d"))
        module, colon, attribute = text.rpartition(":")
        if not colon and re.fullmatch(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)+", text) and not text.endswith(".py"):
            module, _, attribute = text.rpartition(".")
        is_right = module and attribute and all(part.isidentifier() for part in attribute.split("."))
        return f", such as {module}:{attribute}" if is_right else ""

    @property
    def field(self) -> str:
        """The field that errors name."""
        raise NotImplementedError

    @property
    def module(self) -> str:
        """The module's name, or the path of the file."""
        return self.function.rpartition(":")[0]

    @property
    def attribute(self) -> str:
        """The function's name in its module, dotted for a method."""
        return self.function.rpartition(":")[2]

    @property
    def file(self) -> Path | None:
        """The file, if a file was named instead of a module."""
        return Path(self.module) if self.module.endswith(".py") else None


@dataclass(frozen=True, slots=True)
class HostFunction(NamedFunction):
    """Your function, by its name, so that it can be sent to workers. `HostRewards` states the bounds of its fields.

    `function` is `"module:function"` or `"path/to/file.py:function"`, relative to the process's working folder. A row
    is a mapping with `prompt` (text, or a list of messages), `response` (text) and all columns of its dataset.

    | signature | is called as | returns |
    |---|---|---|
    | row | `f(row)` | a number, or a dict with a `score`; None: not applicable |
    | trl | `f(prompts=, completions=, completion_ids=, **columns)`, a list of each | a list of such |
    | verl | `f(data_source=, solution_str=, ground_truth=, extra_info=)` | a number, or a dict with a `score` |
    | reasoning_gym | `f(answer, entry)`; `"reasoning_gym:chain_sum"` is the `score_answer` of that task | a number |

    A dict may also have `answer` (verl: `pred`), the answer that the response gives, for votes, and further numbers,
    which become metrics.

    Your function may be `async`. A row's result must depend on that row alone, since rows come in batches of any size,
    in any order, and again after a failure. Before each call, `random` (and numpy's, if it is imported) is seeded with
    the function's name and the row's text, so every worker draws the same numbers. `async` functions run concurrently:
    give them a `random.Random` of their own.
    """

    name: str
    function: str
    weight: float = 1.0
    signature: Signature = "row"

    def __post_init__(self) -> None:
        self.check()

    @property
    def field(self) -> str:
        """The field that errors name."""
        return f"reward.functions.{self.name}"

    def lacking(self, named: Collection[str], columns: Collection[str]) -> tuple[str, ...]:
        """Return the columns that a call needs and that `columns` lack.

        `named` are a TRL function's arguments without a default, which name columns.

        >>> HostFunction("right", "mine:right", signature="verl").lacking((), ("prompt", "response", "data_source"))
        ('ground_truth',)
        """
        needed: tuple[str, ...] = OF_ROWS
        if self.signature == "trl":
            needed = (*OF_ROWS, *named)
        elif self.signature == "verl":
            needed = (*OF_ROWS, "data_source", *(() if any(name in columns for name in _TRUTH) else ("ground_truth",)))
        elif self.signature == "reasoning_gym" and "entry" not in columns:
            needed = (*OF_ROWS, *_QUESTION)
        return tuple(name for name in needed if name not in columns)


@dataclass(frozen=True, slots=True)
class HostSettings:
    """Settings for a `HostPool`. `HostRewards` states their bounds."""

    workers: int
    """Worker processes, each on one CPU."""
    deadline_seconds: float = 30.0
    """Time limit for a row, in seconds of wall time; importing the function's module does not count."""
    retries: int = 1
    """How often a failed row is tried again."""
    failed_value: float | None = None
    """The value for a failed row; with None it is NaN, and the row gets weight 0."""
    most_failed: float = 0.1
    """The largest share of a `score` call's rows, 0 to 1, that may fail; above it the call raises."""
    start_seconds: float = START_SECONDS
    """Time limit for a worker to import the functions, and to read its rows."""

    @property
    def value_of_failed(self) -> float:
        return math.nan if self.failed_value is None else self.failed_value
