"""What crosses the pipe between the controller and a rank process."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from prefect_rlhf.placement.lease import Backend


@dataclass(frozen=True, slots=True)
class Start:
    """The first message to a rank: who it is and how it joins the world.

    `rank_factory(rank, size)` makes the object whose methods are called; it is importable, so that it crosses.
    """

    rank: int
    size: int
    port: int
    device: Backend
    num_threads: int
    join_seconds: float
    rank_factory: Callable[[int, int], object]
    environment: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Request:
    """Run `method` of the rank's object."""

    method: str
    arguments: tuple[Any, ...]


@dataclass(frozen=True, slots=True)
class Reply:
    """What the method returned, or why it did not; `traceback` is for the log."""

    value: Any = None
    error: Exception | None = None
    traceback: str = ""
