"""A searched plan for people and for the next run: its summary, and its file."""

from __future__ import annotations

from prefect_rlhf.placement.plan import ExecutionPlan
from prefect_rlhf.placement.planner.planned import Planned, PresetResult
from prefect_rlhf.placement.plans.plan_file import plan_yaml
from prefect_rlhf.placement.schedule.estimate import COLD_ITERATIONS
from prefect_rlhf.placement.table import table

SHOWN_SHARE = 0.0005  # of a gap's part: less is shown as 0.0%
PROVED_GAP = 0.0005  # up to which the bound proves the plan itself


def summary(planned: Planned, *others: PresetResult) -> str:
    """Say in a few lines what is known of a plan: estimate, bound and why it binds, `others` and presets beside it."""
    left_out = planned.space.left_out
    return "\n".join(
        [
            f"{planned.seconds:.4g} s an iteration by the estimate, {_against_bound(planned)}",
            f"a cold start: {planned.estimate.cold_seconds:.4g} s for the first {COLD_ITERATIONS} iterations",
            f"what binds: {planned.binding}",
            f"search: {_proof(planned)} ({planned.search.cpu_seconds:.1f} s)",
            f"left out of the search: {left_out}",
            table(planned.rows(*others)),
        ]
    )


def _proof(planned: Planned) -> str:
    """What the search proved of the plan that is printed; of the relaxed problem it may have proved more."""
    if not planned.search.proved_optimal:
        return planned.search.outcome.value
    if planned.gap < PROVED_GAP:
        return f"proved: no plan that was searched is more than {max(0.0, planned.gap):.2%} faster than this one"
    return (
        "the relaxed problem is solved: there rows move for nothing and devices hold the least that they can, so no "
        "plan is below the bound; nothing is proved of plans between it and this one"
    )


def _against_bound(planned: Planned) -> str:
    bound = f"the bound ({planned.lower_bound_seconds:.4g} s)"
    if planned.beats_bound:
        return f"{-planned.gap:.1%} BELOW {bound}, below which no plan is: one of the two is wrong, please report it"
    parts = (f"{share:+.1%} {words}" for words, share in planned.gap_parts.items() if abs(share) >= SHOWN_SHARE)
    why = "; ".join(parts)
    return f"{max(0.0, planned.gap):.1%} above {bound}, below which no plan is{f': {why}' if why else ''}"


def plan_file(planned: Planned, plan: ExecutionPlan) -> str:
    """Return a plan file of `plan`, with what is known of it as comments above."""
    comments = "\n".join(f"# {line}".rstrip() for line in summary(planned).splitlines())
    return f"{comments}\n{plan_yaml(plan)}"
