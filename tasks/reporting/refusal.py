"""Reports a plan that does not fit, in more detail than the line in the flow run's state."""

from prefect.artifacts import create_markdown_artifact

from prefect_rlhf.errors.errors import PlanDoesNotFit
from prefect_rlhf.tasks.reporting.publish import publish
from prefect_rlhf.tasks.run_log import run_log


def show_refusal(error: PlanDoesNotFit) -> None:
    """Report the memory use and possible remedies, in the log and in an artifact."""
    run_log().error("%s", error.report)
    text = f"{error}\n\n```text\n{error.report}\n```\n\n```json\n{error.details}\n```"
    publish(create_markdown_artifact, text, key="does-not-fit", description="Why the plan was refused")
