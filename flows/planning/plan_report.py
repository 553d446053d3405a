"""The answer to a what-if, for people and machines: text, Markdown, and the files of its folder."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from prefect_rlhf.flows.training.searched_plan import plan_file, summary
from prefect_rlhf.placement.graph import DataflowGraph
from prefect_rlhf.placement.layout.alignment import aligned
from prefect_rlhf.placement.pictures.plan import plan_svg
from prefect_rlhf.placement.pictures.sweep import sweep_svg
from prefect_rlhf.placement.pictures.text import plan_rows
from prefect_rlhf.placement.plan import ExecutionPlan
from prefect_rlhf.placement.planner.explain import Explanation, in_words
from prefect_rlhf.placement.planner.planned import Planned
from prefect_rlhf.placement.planner.question import Question
from prefect_rlhf.placement.planner.sweep import Sweep
from prefect_rlhf.placement.table import table


@dataclass(frozen=True, slots=True)
class Section:
    """A heading, and text in columns."""

    title: str
    text: str


@dataclass(frozen=True, slots=True)
class PlanAnswer:
    """A plan and what is known of it."""

    question: Question
    planned: Planned
    explanations: tuple[Explanation, ...] = ()
    sweep: Sweep | None = None

    def sections(self) -> Iterator[Section]:
        """Everything that a person may want to read, the most wanted first."""
        yield Section("Question", question_text(self.question))
        yield Section("Answer", summary(self.planned))
        yield Section("Plan", table(plan_rows(self.planned.plan, self.question.graph)))
        if self.sweep:
            yield Section("Sizes", self.sweep.text())
        if self.explanations:
            yield Section("Why", explanation_text(self.explanations))
        yield Section("Memory", self.planned.certificate.table())

    def text(self) -> str:
        """For a terminal."""
        return "\n\n".join(section.text for section in self.sections())

    def markdown(self) -> str:
        """The same for a page; the pictures lie beside it."""
        parts = [f"## {section.title}\n\n```text\n{section.text}\n```" for section in self.sections()]
        pictures = [f"![{name}]({name})" for name in self.files() if name.endswith(".svg")]
        return "\n\n".join([f"# Plan of {self.question.graph.name}", *parts, *pictures]) + "\n"

    def plan_file(self) -> str:
        """The plan; what is known of it stands above as comments."""
        return plan_file(self.planned, without_orders(self.planned.plan, self.question.graph))

    def files(self) -> dict[str, str]:
        """Name and content of each file but the report."""
        always = {
            "plan.yaml": self.plan_file(),
            "certificate.json": self.planned.certificate.to_json() + "\n",
            "timeline.svg": plan_svg(self.planned.estimate) + "\n",
        }
        if self.sweep is None:
            return always
        return always | {"sweep.json": self.sweep.to_json() + "\n", "sweep.svg": sweep_svg(self.sweep) + "\n"}

    def write(self, folder: Path) -> dict[str, Path]:
        """Write every file; their paths by name."""
        folder.mkdir(parents=True, exist_ok=True)
        contents: Mapping[str, str] = {**self.files(), "report.md": self.markdown()}
        for name, content in contents.items():
            (folder / name).write_text(content)
        return {name: folder / name for name in contents}


def without_orders(plan: ExecutionPlan, graph: DataflowGraph) -> ExecutionPlan:
    """The plan without the orders of devices that a run chooses by itself: shorter to read."""
    plain = replace(plan, placements=tuple((name, replace(old, device_order=())) for name, old in plan.placements))
    return plain if aligned(plain, graph) == plan else plan


def explanation_text(explanations: Sequence[Explanation]) -> str:
    """Three lines for each call."""
    return "\n".join(
        f"{one.call}: {in_words(one.placement)}, {one.seconds:.3g} s\n    {one.why()}\n    runner-up: {one.costs()}"
        for one in explanations
    )


def question_text(question: Question) -> str:
    """What was asked, with what was filled in."""
    graph, cluster, workload = question.graph, question.site.cluster, question.workload
    nodes = question.site.sources.nodes
    kinds = " and ".join(dict.fromkeys(node.device.name for node in nodes))
    network = f", network {nodes[0].network.name}" if nodes[0].network else ""
    rows = max(call.num_rows for call in graph if call.every is None)
    models = [
        {
            "role": model.role,
            "model": model.path,
            "layers": str(model.shape.num_layers),
            "hidden": str(model.shape.hidden_size),
            "head": model.head,
            "format": model.dtype,
            "trained": "yes" if graph.trained_by(model.role) else "",
        }
        for model in graph.models
    ]
    return "\n".join(
        [
            f"{graph.name} on {question.site.mesh.num_devices} devices ({question.site.mesh.name} of "
            f"{cluster.num_nodes} x {cluster.devices_per_node}, {kinds}{network})",
            f"{rows} rows a step, prompts of {workload.prompts.mean:.0f} and responses of "
            f"{workload.responses.mean:.0f} tokens on average, at most {workload.longest} together",
            table(models),
        ]
    )
