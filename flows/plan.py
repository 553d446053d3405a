"""The flow `rlhf/plan`: a plan for a cluster that need not be there, as artifacts of a run that takes no device."""

from __future__ import annotations

import inspect
from base64 import b64encode
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

from prefect import Flow, get_run_logger
from prefect.artifacts import create_markdown_artifact, create_table_artifact
from prefect.runtime import flow_run
from pydantic import Field

from prefect_rlhf.flows.forms.check import check_parameters
from prefect_rlhf.flows.forms.plan_options import PlanOptions
from prefect_rlhf.flows.planning.answer import answer_question
from prefect_rlhf.flows.planning.plan_report import PlanAnswer
from prefect_rlhf.placement.errors import PlanDoesNotFit, RlhfError
from prefect_rlhf.placement.pictures.text import plan_rows
from prefect_rlhf.placement.search.driver import Progress
from prefect_rlhf.tasks.failures import failed
from prefect_rlhf.tasks.reporting.publish import publish
from prefect_rlhf.tasks.reporting.report import show_refusal


class PlanForm(PlanOptions):
    """The options with what tells a worker that no device is wanted."""

    dry_run: Literal[True] = Field(True, description="Always true: a worker leases no device to a plan.")


class PlanFlow(Flow[..., Any]):
    """A Prefect flow that refuses a wrong parameter in one line."""

    def validate_parameters(self, parameters: dict[str, Any]) -> dict[str, Any]:
        """The parameters as their types. Raises InvalidInput for the first mistake."""
        check_parameters(inspect.signature(self.fn), parameters)
        return super().validate_parameters(parameters)


def with_form(body: Callable[[PlanForm], Any]) -> PlanFlow:
    """The Prefect flow `rlhf` whose parameters are the form's fields."""

    def entry(**parameters: Any) -> Any:
        return body(PlanForm(**parameters))

    entry.__name__, entry.__qualname__, entry.__module__ = body.__name__, body.__qualname__, body.__module__
    entry.__doc__ = PlanForm.described(inspect.getdoc(body) or body.__name__)
    fields = PlanForm.signature()
    entry.__signature__ = inspect.Signature(fields, return_annotation=dict)  # type: ignore[attr-defined]  # read by inspect
    entry.__annotations__ = {field.name: field.annotation for field in fields}
    return PlanFlow(entry, name="rlhf")


@with_form
def plan(options: PlanForm) -> Any:
    """Search a plan and show what is known of it; takes no device. Returns the paths of what it wrote, by name."""
    try:
        return _answered(options)
    except RlhfError as error:  # a mistake that a person can mend: its one line, without a traceback
        if isinstance(error, PlanDoesNotFit):
            show_refusal(error)
        return failed(error)


def _answered(options: PlanOptions) -> dict[str, str]:
    log = get_run_logger()

    def show(progress: Progress) -> None:
        log.info("%s", progress)

    answer = answer_question(options, show)
    log.info("%s", answer.text())
    show_artifacts(answer)
    folder = Path(options.output_dir).expanduser() / (flow_run.name or "plan")
    return {name: str(path.resolve()) for name, path in answer.write(folder).items()}


def show_artifacts(answer: PlanAnswer) -> None:
    """The plan and the comparison as tables, all that is known of them as a page with its pictures."""
    found, graph = answer.found, answer.question.graph
    publish(create_table_artifact, plan_rows(found.plan, graph), key="plan", description=f"Plan of {graph.name}")
    publish(create_table_artifact, found.rows(), key="presets", description="The plan beside the presets")
    publish(create_table_artifact, found.certificate.rows(), key="memory", description="What fills each device")
    publish(create_markdown_artifact, page(answer), key="what-if", description=f"Plan of {graph.name}")


def page(answer: PlanAnswer) -> str:
    """The report with its pictures inside."""
    text = answer.markdown()
    for name, content in answer.files().items():
        if name.endswith(".svg"):
            inside = f"data:image/svg+xml;base64,{b64encode(content.encode()).decode()}"
            text = text.replace(f"]({name})", f"]({inside})")
    return text
