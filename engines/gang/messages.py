"""Messages on the pipe between the controller and a rank process."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from prefect_rlhf.engines.gang.preload import ENGINES, modules_of
from prefect_rlhf.placement.mesh import Backend

StartMethod = Literal["fork", "spawn"]


@dataclass(frozen=True, slots=True)
class ProcessSettings:
    """How rank processes start, what forked ones find imported, and what is added to their environment."""

    method: StartMethod
    preload: tuple[str, ...]
    environment: Mapping[str, str]


@dataclass(frozen=True, slots=True)
class GangSettings:
    """The rank processes of a gang: how many, what they are, and how they start.

    `rank_factory(rank, size)` makes the object whose methods are called; it is importable, so that it crosses.
    `environment` is added to the ranks' environment, which is otherwise the controller's. Forked ranks find the modules
    `preload` imported.
    """

    size: int
    rank_factory: Callable[[int, int], object]
    device: Backend = "cpu"
    environment: Mapping[str, str] = field(default_factory=dict)
    num_threads: int = 1
    start_seconds: float = 120.0
    preload: tuple[str, ...] = modules_of(ENGINES)
    method: StartMethod | None = None  # None: fork, but spawn on CUDA, which does not survive a fork

    @property
    def processes(self) -> ProcessSettings:
        """What is known of the processes before they know what they are."""
        method = self.method or ("spawn" if self.device == "cuda" else "fork")
        return ProcessSettings(method, self.preload, self.environment)


@dataclass(frozen=True, slots=True)
class Start:
    """The first message to a rank: who it is, which device of its node it has, and where its world meets."""

    rank: int
    device: int
    host: str
    port: int
    gang: GangSettings


@dataclass(frozen=True)
class Request:
    """Run `method` of the rank's object."""

    method: str
    arguments: tuple[Any, ...]


@dataclass(frozen=True)
class Reply:
    """The result of the method, or why there is none; `traceback` and `warnings`, a line each, are for the log."""

    value: Any = None
    error: Exception | None = None
    traceback: str = ""
    warnings: tuple[str, ...] = ()
