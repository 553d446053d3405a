"""The report of a plan that does not fit, besides the state's one line."""

from __future__ import annotations

from prefect.artifacts import create_markdown_artifact

from prefect_rlhf.placement.errors import PlanDoesNotFit
from prefect_rlhf.tasks.reporting.publish import publish
from prefect_rlhf.tasks.run_log import run_log


def show_refusal(error: PlanDoesNotFit) -> None:
    """Say in log and artifact what fills the devices and what would help."""
    run_log().error("%s", error.report)
    text = f"{error}\n\n```text\n{error.report}\n```\n\n```json\n{error.details}\n```"
    publish(create_markdown_artifact, text, key="does-not-fit", description="Why the plan was refused")
