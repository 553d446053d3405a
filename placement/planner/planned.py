"""A planned graph as a value: the plan, its certificate, its bound, and the presets beside it."""

from __future__ import annotations

from dataclasses import dataclass

from prefect_rlhf.placement.memory.certificate import Certificate
from prefect_rlhf.placement.plan import ExecutionPlan
from prefect_rlhf.placement.planner.candidates import Candidates
from prefect_rlhf.placement.schedule.estimate import Estimate
from prefect_rlhf.placement.search.driver import SearchResult


@dataclass(frozen=True, slots=True)
class PresetResult:
    """A plan by a name that people know: its estimate, or why there is none."""

    name: str
    plan: ExecutionPlan | None = None
    estimate: Estimate | None = None
    refused: str = ""


@dataclass(frozen=True, slots=True)
class Planned:
    """`lower_bound_seconds`: no plan of the whole space takes less per iteration. `binding` says why, in words.

    `candidates` are what there was to choose from.
    """

    plan: ExecutionPlan
    estimate: Estimate
    certificate: Certificate
    lower_bound_seconds: float
    binding: str
    search: SearchResult
    presets: tuple[PresetResult, ...]
    candidates: Candidates

    @property
    def seconds(self) -> float:
        """Of one iteration."""
        return self.estimate.seconds

    @property
    def gap(self) -> float:
        """By how much of the lower bound the plan is above it."""
        return self.seconds / self.lower_bound_seconds - 1

    def rows(self) -> list[dict[str, str]]:
        """For a table: the plan and every preset."""
        every = (PresetResult(self.plan.name, self.plan, self.estimate), *self.presets)
        return [_row(compared, self.seconds) for compared in every]


def _row(compared: PresetResult, best_seconds: float) -> dict[str, str]:
    if compared.estimate is None:
        return {"plan": compared.name, "seconds": "-", "against auto": "-", "note": compared.refused}
    seconds = compared.estimate.seconds
    return {
        "plan": compared.name,
        "seconds": f"{seconds:.3f}",
        "against auto": f"{seconds / best_seconds - 1:+.1%}",
        "note": "",
    }
