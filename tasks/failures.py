"""How a foreseeable failure looks in Prefect: one line as the state's message, no traceback."""

from __future__ import annotations

from typing import Any

from prefect import get_run_logger
from prefect.artifacts import create_markdown_artifact
from prefect.client.schemas.objects import State
from prefect.states import Failed

from prefect_rlhf.placement.errors import PlanDoesNotFit, RlhfError
from prefect_rlhf.tasks.reporting.publish import publish


def failed(error: RlhfError) -> State[Any]:
    """The state of a task or flow run that ended by an error of ours; asking it for a result raises the error."""
    return Failed(message=f"{type(error).__name__}: {error}", data=error)


def show_refusal(error: PlanDoesNotFit) -> None:
    """Say in log and artifact what fills the devices and what would help; the state has but one line."""
    get_run_logger().error("%s", error.report)
    text = f"{error}\n\n```text\n{error.report}\n```\n\n```json\n{error.details}\n```"
    publish(create_markdown_artifact, text, key="does-not-fit", description="Why the plan was refused")
