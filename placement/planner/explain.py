"""Why a plan places each call as it does: what binds it, and what the runner-up would cost.

For each call every other placement is ranked by the search's own problem, all other calls as they are. The first that
fits is estimated on its augmented graph, as the plan was: the runner-up. A faster one that does not fit is named: there
memory binds.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from prefect_rlhf.placement.memory.bytes import byte_size
from prefect_rlhf.placement.plan import ExecutionPlan, Placement
from prefect_rlhf.placement.planner.candidates import Candidates
from prefect_rlhf.placement.planner.neighbours import NOTHING, changed_plan, neighbours
from prefect_rlhf.placement.planner.plan_problem import all_candidates
from prefect_rlhf.placement.planner.question import Planner
from prefect_rlhf.placement.schedule.estimate import Estimate
from prefect_rlhf.placement.schedule.schedule import slack_seconds

TRIED = 6  # alternatives of a call that are estimated at most


@dataclass(frozen=True, slots=True)
class Other:
    """Another placement of a call: what an iteration would take, and the fullest peak where it does not fit."""

    placement: Placement
    iteration_seconds: float
    peak_bytes: int | None = None


@dataclass(frozen=True, slots=True)
class Explanation:
    """`seconds` the call takes in an iteration, and `slack_seconds` it could take more for nothing.

    `too_large` would be faster and does not fit. `runner_up` is the best other placement that fits; None: none does.
    """

    call: str
    placement: Placement
    seconds: float
    slack_seconds: float
    iteration_seconds: float
    usable_bytes: int
    too_large: Other | None
    runner_up: Other | None

    def why(self) -> str:
        """What binds the call."""
        critical = self.slack_seconds <= NOTHING * self.iteration_seconds
        words = (
            "on the critical path: a second more of it is one more of the iteration"
            if critical
            else f"not on the critical path: it may take {self.slack_seconds:.3g} s longer"
        )
        if self.too_large is None or self.too_large.peak_bytes is None:
            return f"{words}; no other placement that was tried is faster"
        saved = self.iteration_seconds - self.too_large.iteration_seconds
        return (
            f"{words}; memory binds: {in_words(self.too_large.placement)} would save {saved:.3g} s, but needs "
            f"{byte_size(self.too_large.peak_bytes)} of {byte_size(self.usable_bytes)}"
        )

    def costs(self) -> str:
        """What the runner-up would cost."""
        if self.runner_up is None:
            return "none of those that were tried fits"
        more = self.runner_up.iteration_seconds - self.iteration_seconds
        faster = ", faster by the estimate: the search counts moves of rows as nothing" if more < 0 else ""
        return f"{in_words(self.runner_up.placement)}: {more:+.3f} s an iteration{faster}"


def explain(
    planner: Planner, plan: ExecutionPlan, made: Estimate, every: Candidates | None = None
) -> tuple[Explanation, ...]:
    """Of each call with a model that runs in every iteration; `made` is the plan's estimate, `every` what there was.

    Without `every`, all candidates that there are.
    """
    setting = planner.setting()
    spare = slack_seconds(made.schedule)
    usable = planner.certificate(plan).usable_bytes
    found = []
    for name, others in neighbours(planner, plan, setting, every or all_candidates(setting)).items():
        slots = [slot for slot in made.schedule.slots if slot.node.id == f"{name}@{slot.node.step}"]
        too_large, runner_up = _best_two(planner, plan, made.seconds, name, others)
        longest, least = max(slot.seconds for slot in slots), min(spare[slot.node.id] for slot in slots)
        found.append(Explanation(name, plan[name], longest, least, made.seconds, usable, too_large, runner_up))
    return tuple(found)


def in_words(placement: Placement) -> str:
    """`n0:0-7 dp4 tp2, 8 micro-batches`."""
    cuts = f", {placement.micro_batches} micro-batches" if placement.micro_batches > 1 else ""
    return f"{placement.name} {placement.engine}{cuts}"


def _best_two(
    planner: Planner,
    plan: ExecutionPlan,
    seconds: float,
    call: str,
    others: Iterable[tuple[Placement, bool]],
) -> tuple[Other | None, Other | None]:
    """The first that would be faster and does not fit, and the first that fits."""
    too_large: Other | None = None
    tried = 0
    for placement, has_room in others:
        if tried == TRIED:
            break
        if not has_room and too_large is not None:
            continue
        changed = changed_plan(planner, plan, call, placement)
        if changed is None:
            continue
        tried += 1
        certificate, takes = planner.certificate(changed), planner.estimate(changed).seconds
        if certificate.fits:
            return too_large, Other(placement, takes)
        if too_large is None and takes < seconds * (1 - NOTHING) and certificate.fullest is not None:
            too_large = Other(placement, takes, certificate.fullest.num_bytes)
    return too_large, None
