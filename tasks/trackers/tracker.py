"""The protocol of a tracker: it is opened once for a run, and then receives the steps in order."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from prefect_rlhf.tasks.settings import by_dotted_name
from prefect_rlhf.tasks.trackers.samples import Table


@dataclass(frozen=True, slots=True)
class TrackedStep:
    """A line of the journal under the tracker's names, without `step`, and samples by the folder that contains them.

    `time` is when it was written, in Unix seconds.
    """

    step: int
    time: float
    values: Mapping[str, float]
    samples: Mapping[str, Table]


@dataclass(frozen=True, slots=True)
class TrackedRun:
    """A tracker's view of a run: its folder, its name, and the project that groups runs for comparison.

    `parameters` are the parameters of the flow run, as JSON values.
    """

    run_dir: Path
    name: str
    project: str
    parameters: Mapping[str, Any] = field(default_factory=dict)


class Tracker(Protocol):
    """A display of steps. A single thread uses it, and it may raise any exception."""

    def add(self, step: TrackedStep) -> None:
        """Show a step; steps arrive in order, each once."""

    def close(self, *, has_failed: bool) -> None:
        """Write the remaining data; `has_failed` is true if an error ended the run."""


def flat(parameters: Mapping[str, Any]) -> dict[str, str]:
    """Return nested parameters as text, each under its dotted path.

    >>> flat({"algo": {"lr": 0.1, "stop": []}, "steps": 3})
    {'algo.lr': '0.1', 'algo.stop': '[]', 'steps': '3'}
    """
    return {name: str(value) for name, value in by_dotted_name(parameters).items()}


Opener = Callable[[TrackedRun], Tracker]
"""Opens a new tracker for a run, after removing the data of an earlier attempt at the run."""
