"""The messages between a pool and its workers that score rows."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from prefect_rlhf.engines.functions.function import HostFunction
from prefect_rlhf.engines.functions.message import Message, Refused
from prefect_rlhf.engines.functions.scores import Verdict


@dataclass(frozen=True, slots=True)
class Start:
    """The first message to a worker. `path` is searched for modules; `concurrent` async calls may run at a time."""

    functions: tuple[HostFunction, ...]
    path: tuple[str, ...]
    deadline_seconds: float
    concurrent: int


@dataclass(frozen=True, slots=True)
class Job:
    """Calls of a function: each call's rows, by call number."""

    function: int
    calls: Mapping[int, tuple[Mapping[str, Any], ...]]


@dataclass(frozen=True, slots=True)
class Loading(Message):
    """A worker begins to import a function."""

    function: int


@dataclass(frozen=True, slots=True)
class Loaded(Message):
    """A function is imported: whether it is async, the columns that it names, its `file:line in function`."""

    function: int
    asynchronous: bool
    named: tuple[str, ...]
    place: str


@dataclass(frozen=True, slots=True)
class Begun(Message):
    """A call begins."""

    call: int


@dataclass(frozen=True, slots=True)
class Done(Message):
    """A call has ended: a verdict for each of its rows."""

    call: int
    verdicts: tuple[Verdict, ...]


Said = Loading | Refused | Loaded | Begun | Done
