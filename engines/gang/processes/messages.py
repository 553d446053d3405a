"""Messages on the pipe between the controller and a rank process."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Generic, Literal

from prefect_rlhf.engines.gang.processes.preload import modules_of
from prefect_rlhf.engines.gang.protocol import AnyRank
from prefect_rlhf.placement.devices.mesh import Backend
from prefect_rlhf.placement.engine_traits import TRAITS, EngineTraits
from prefect_rlhf.placement.models.outputs import OUTPUTS, Output
from prefect_rlhf.placement.plan import EngineKind

StartMethod = Literal["fork", "spawn"]


@dataclass(frozen=True, slots=True)
class ProcessSettings:
    """How rank processes are started, the modules that forked ranks find imported, and additional environment."""

    method: StartMethod
    preload: tuple[str, ...]
    environment: Mapping[str, str]


@dataclass(frozen=True, slots=True)
class GangSettings(Generic[AnyRank]):
    """The rank processes of a gang: their number, their objects, and their start."""

    size: int
    rank_factory: Callable[[int, int], AnyRank]
    """Called with (rank, size); makes the object that runs the methods. It must be importable, because it is sent to
    another process."""
    device: Backend = "cpu"
    environment: Mapping[str, str] = field(default_factory=dict)
    """Added to the controller's environment, which the ranks inherit."""
    num_threads: int = 1
    start_seconds: float = 120.0
    """Limit of each phase of their start."""
    collective_seconds: float = 7200.0
    """A collective of ranks fails after so long. It must exceed every call's deadline, because the deadline's error
    gives a reason, while NCCL's error just ends the process."""
    preload: tuple[str, ...] = field(default_factory=lambda: modules_of(TRAITS))
    """Modules that forked ranks find imported."""
    engines: Mapping[EngineKind, EngineTraits] = field(default_factory=lambda: dict(TRAITS))  # also those registered
    outputs: Mapping[str, Output] = field(default_factory=lambda: dict(OUTPUTS))  # also those registered
    records: Path | None = None
    """If a call passes its deadline, each rank writes its latest collectives to this folder."""
    method: StartMethod | None = None  # None: fork, but spawn on CUDA, which does not survive a fork

    @property
    def processes(self) -> ProcessSettings:
        """The settings of the processes before they receive their ranks."""
        method = self.method or ("spawn" if self.device == "cuda" else "fork")
        return ProcessSettings(method, self.preload, self.environment)


@dataclass(frozen=True, slots=True)
class Start:
    """The first message to a rank: its number, its device on its node, and the address of its world's store."""

    rank: int
    device: int
    host: str
    port: int
    gang: GangSettings[object]


@dataclass(frozen=True)
class Request:
    """Run `method` of the rank's object."""

    method: str
    arguments: tuple[Any, ...]


@dataclass(frozen=True)
class RecordRequest:
    """Write the rank's latest collectives to the folder of the settings; see `flight_recorder`."""


@dataclass(frozen=True)
class Reply:
    """The result of the method, or its error; `traceback` and `warnings`, a line each, are for the log."""

    value: Any = None
    error: Exception | None = None
    traceback: str = ""
    warnings: tuple[str, ...] = ()
