"""A searched plan for people and for the next run: its summary, and its file."""

from __future__ import annotations

from prefect_rlhf.placement.plan import ExecutionPlan
from prefect_rlhf.placement.planner.planned import Planned
from prefect_rlhf.placement.plans.plan_file import plan_yaml
from prefect_rlhf.placement.table import table


def summary(found: Planned) -> str:
    """What is known of a plan, in a few lines: its estimate, the bound and why it binds, and the presets beside it."""
    return "\n".join(
        [
            f"{found.seconds:.4g} s an iteration by the estimate, {found.gap:.1%} above the bound "
            f"({found.lower_bound_seconds:.4g} s), below which no plan is",
            f"what binds: {found.binding}",
            f"search: {found.search.outcome.value} ({found.search.cpu_seconds:.1f} s)",
            table(found.rows()),
        ]
    )


def plan_file(found: Planned, plan: ExecutionPlan) -> str:
    """A plan file of `plan`, with what is known of it as comments above."""
    said = "\n".join(f"# {line}".rstrip() for line in summary(found).splitlines())
    return f"{said}\n{plan_yaml(plan)}"
