"""The flow `rlhf/plan`: a plan for any cluster, published as artifacts by a run that uses no device."""

from base64 import b64encode
from collections.abc import Callable
from typing import Any, Literal

from prefect import get_run_logger
from prefect.artifacts import create_markdown_artifact, create_table_artifact
from prefect.runtime import flow_run
from pydantic import Field

from prefect_rlhf.files.remote_path import require_local
from prefect_rlhf.flows.forms.form_flow import FormFlow, form_entry
from prefect_rlhf.flows.forms.plan_options import PlanOptions
from prefect_rlhf.flows.planning.answer import answer_question
from prefect_rlhf.flows.planning.plan_report import PlanAnswer
from prefect_rlhf.tasks.reporting.pictures.speeds import iteration_text
from prefect_rlhf.tasks.reporting.publish import publish


class PlanForm(PlanOptions):
    """The options, and the field that lets a worker see that the flow needs no device."""

    dry_run: Literal[True] = Field(True, description="Always true: a worker leases no device for planning.")


def with_form(body: Callable[[PlanForm], Any]) -> FormFlow:
    """Convert a body that takes the form to the Prefect flow `rlhf`, whose parameters are the form's fields."""
    return FormFlow(form_entry(body, PlanForm, lambda parameters: body(PlanForm(**parameters))), name="rlhf")


@with_form
def plan(options: PlanForm) -> dict[str, str]:
    """Search for a plan and publish the results; uses no device. Returns the paths of the written files by name."""
    log = get_run_logger()
    answer = answer_question(options, lambda progress: log.info("%s", progress))
    log.info("%s", answer.text())
    show_artifacts(answer)
    folder = require_local(options.output_dir, "output_dir").expanduser() / (flow_run.name or "plan")
    return {name: str(path.resolve()) for name, path in answer.write(folder).items()}


def show_artifacts(answer: PlanAnswer) -> None:
    """Publish the plan, its comparison and its memory use as tables, and the whole report as a page with pictures."""
    planned = answer.planned
    title = f"Plan of {answer.question.graph.name}"
    speed = f"{title}: {iteration_text(answer.work, planned.seconds)}"
    compared = "The plan compared with the presets"
    publish(create_table_artifact, answer.plan_rows, key="plan", description=speed)
    publish(create_table_artifact, planned.rows(work=answer.work), key="presets", description=compared)
    publish(create_table_artifact, planned.certificate.rows(), key="memory", description="Memory use of each device")
    publish(create_markdown_artifact, page(answer), key="what-if", description=title)


def page(answer: PlanAnswer) -> str:
    """Return the report with its pictures embedded."""
    text = answer.markdown()
    for name, content in answer.files.items():
        if name.endswith(".svg"):
            picture = f"data:image/svg+xml;base64,{b64encode(content.encode()).decode()}"
            text = text.replace(f"]({name})", f"]({picture})")
    return text
