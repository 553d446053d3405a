"""Calls to a run's ranks, each within the run's deadline."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from prefect_rlhf.engines.gang.protocol import Arguments, Gang, Result
from prefect_rlhf.engines.rank.rank import Rank
from prefect_rlhf.placement.augmented.resources import Resource
from prefect_rlhf.tasks.running.training_run import TrainingRun


@dataclass(frozen=True, slots=True)
class RankCalls:
    """`Gang.call` with a deadline: that of the working role, or of all other calls."""

    run: TrainingRun
    gang: Gang[Rank]

    def __call__(
        self,
        method: Callable[[Rank, *Arguments], Result],
        arguments: Mapping[int, tuple[*Arguments]],
        doing: str,
        resource: Resource = "compute",
        role: str | None = None,
    ) -> dict[int, Result]:
        """Run a method of Rank on each rank of `arguments`. Raises the errors of `Gang.call`."""
        seconds = self.run.role_deadlines.get(role or "", self.run.call_deadline_seconds)
        return self.gang.call(method, arguments, doing=doing, deadline_seconds=seconds, resource=resource)
