"""A plan that you wrote, priced and certified next to the search's plan."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from pathlib import Path

from prefect_rlhf.errors.errors import InvalidInput, PlanDoesNotFit
from prefect_rlhf.placement.layout.alignment import aligned
from prefect_rlhf.placement.memory.bytes import byte_size
from prefect_rlhf.placement.memory.certificate import Certificate, certify_plan
from prefect_rlhf.placement.memory.room import without_room
from prefect_rlhf.placement.plan import ExecutionPlan
from prefect_rlhf.placement.planner.planned import Planned, PresetResult
from prefect_rlhf.placement.planner.question import Question
from prefect_rlhf.placement.plans.check import check_plan
from prefect_rlhf.placement.plans.plan_file import read_plan
from prefect_rlhf.placement.plans.presets import PRESETS
from prefect_rlhf.placement.schedule.estimate import Estimate


@dataclass(frozen=True, slots=True)
class GivenPlan:
    """A file's plan as a run would use it, with its estimate and certificate."""

    plan: ExecutionPlan
    estimate: Estimate
    certificate: Certificate

    @classmethod
    def read(cls, path: str, question: Question) -> GivenPlan:
        """Read a plan for the question's graph and devices.

        Raises InvalidInput with a single-line message if it cannot run. A plan that exceeds memory is still priced.
        """
        graph, site = question.graph, question.site
        plan = aligned(check_plan(read_plan(path, without_room(site.cluster)), graph, site.mesh), graph)
        if plan.name in ("auto", *PRESETS):  # the answer's tables name other plans so
            plan = replace(plan, name=f"{plan.name} of {Path(path).name}")
        return cls(plan, question.estimate(plan), certify_plan(plan, graph, question.workload, site.backend))

    def with_room_of(self, question: Question) -> ExecutionPlan:
        """Return the plan with the question's headroom, which a search's plans keep."""
        return replace(self.plan, cluster=replace(self.plan.cluster, room=question.site.cluster.room))

    @property
    def row(self) -> PresetResult:
        """The plan's row in the table of plans."""
        return PresetResult(self.plan.name, self.plan, self.estimate, "" if self.certificate.fits else "does not fit")

    def text(self, planned: Planned) -> str:
        """Return a few lines that compare it with the bound, the search's plan and the memory."""
        seconds, bound = self.estimate.seconds, planned.lower_bound_seconds
        above = seconds / bound - 1
        against = (
            f"{above:.1%} above the bound ({bound:.4g} s)"
            if above >= 0
            else f"{-above:.1%} below the bound ({bound:.4g} s): it is outside the search space"
        )
        return "\n".join(
            [
                f"{self.plan.name}: {seconds:.4g} s per iteration by the estimate, {against}, "
                f"{seconds / planned.seconds - 1:+.1%} against {planned.plan.name}",
                self._memory(),
            ]
        )

    def beside(self, error: InvalidInput) -> PlanDoesNotFit:
        """Return the error of a search that found no plan, extended by a report on this plan."""
        found = (error.report,) if isinstance(error, PlanDoesNotFit) else ()
        mine = (
            f"{self.plan.name}: {self.estimate.seconds:.4g} s per iteration by the estimate; no other plan was found",
            self._memory(),
            self.certificate.table(),
        )
        as_json = {"certificate": json.loads(self.certificate.to_json()), "remedies": []}
        details = error.details if isinstance(error, PlanDoesNotFit) else json.dumps(as_json)
        return PlanDoesNotFit(error.field, error.seen, error.expected, "\n".join([*mine, *found]), details)

    def _memory(self) -> str:
        peak = self.certificate.fullest
        if peak is None:
            return "memory: unused"
        held = f"{byte_size(peak.num_bytes)} of {byte_size(peak.device_bytes)} on {peak.device} at {peak.node}"
        return f"memory: {'fits' if self.certificate.fits else 'does not fit, so it cannot run'}, {held}"


def given_plan(path: str, question: Question) -> GivenPlan | None:
    """Return the plan of a file, or None if no file is named."""
    return GivenPlan.read(str(Path(path).expanduser()), question) if path else None
