"""A searched plan for people and for the next run: its summary, and its file."""

from __future__ import annotations

from prefect_rlhf.placement.plan import ExecutionPlan
from prefect_rlhf.placement.planner.planned import Planned, PresetResult
from prefect_rlhf.placement.plans.plan_file import plan_yaml
from prefect_rlhf.placement.table import table


def summary(planned: Planned, *others: PresetResult) -> str:
    """Say in a few lines what is known of a plan: estimate, bound and why it binds, `others` and presets beside it."""
    left_out = planned.space.context.space.left_out
    return "\n".join(
        [
            f"{planned.seconds:.4g} s an iteration by the estimate, {planned.gap:.1%} above the bound "
            f"({planned.lower_bound_seconds:.4g} s), below which no plan is",
            f"what binds: {planned.binding}",
            f"search: {planned.search.outcome.value} ({planned.search.cpu_seconds:.1f} s)",
            *([f"left out of the search: {left_out}"] if left_out else []),
            table(planned.rows(*others)),
        ]
    )


def plan_file(planned: Planned, plan: ExecutionPlan) -> str:
    """Return a plan file of `plan`, with what is known of it as comments above."""
    comments = "\n".join(f"# {line}".rstrip() for line in summary(planned).splitlines())
    return f"{comments}\n{plan_yaml(plan)}"
