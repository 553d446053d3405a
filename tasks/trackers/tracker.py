"""The protocol of a tracker: it is opened once for a run, then told one step after another."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from prefect_rlhf.tasks.trackers.samples import Table


@dataclass(frozen=True, slots=True)
class TrackedStep:
    """A line of the journal under the tracker's names, `step` apart, and samples by the folder that they were read in.

    `time` is when it was written, in Unix seconds.
    """

    step: int
    time: float
    values: Mapping[str, float]
    samples: Mapping[str, Table]


@dataclass(frozen=True, slots=True)
class TrackedRun:
    """What a tracker knows of a run: its folder, its name, and the project in which it is compared with others.

    `parameters` are those of the flow run, as JSON has them.
    """

    run_dir: Path
    name: str
    project: str
    parameters: Mapping[str, Any] = field(default_factory=dict)


class Tracker(Protocol):
    """Where steps are shown. It is used by one thread, and may raise whatever it likes."""

    def add(self, step: TrackedStep) -> None:
        """Show a step; steps come in order, each once."""

    def close(self, *, has_failed: bool) -> None:
        """Write what is left; `has_failed` says that an error ended the run."""


def flat(parameters: Mapping[str, Any], prefix: str = "") -> dict[str, str]:
    """Return nested parameters as text, each under its dotted path.

    >>> flat({"algo": {"lr": 0.1, "stop": []}, "steps": 3})
    {'algo.lr': '0.1', 'algo.stop': '[]', 'steps': '3'}
    """
    found: dict[str, str] = {}
    for name, value in parameters.items():
        inner = isinstance(value, Mapping) and value
        found |= flat(value, f"{prefix}{name}.") if inner else {f"{prefix}{name}": str(value)}
    return found


Opener = Callable[[TrackedRun], Tracker]
"""Opens a tracker anew for a run: what an earlier attempt at the run left in it is removed first."""
