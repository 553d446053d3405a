"""The answer to a what-if question, for people and machines: text, Markdown, and files in a folder."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from prefect_rlhf.errors.table import table
from prefect_rlhf.flows.hardware.profiles import origin
from prefect_rlhf.flows.planning.assumptions import assumptions
from prefect_rlhf.flows.planning.first_screen import STEPS, YOURS, fit_line, place_of, steps_line
from prefect_rlhf.flows.planning.given_plan import GivenPlan
from prefect_rlhf.flows.planning.hints import uneven_batch
from prefect_rlhf.flows.planning.notes import not_run, notes, rows_of_a_micro_batch
from prefect_rlhf.flows.planning.record import Range, public_range
from prefect_rlhf.flows.training.choice.searched_plan import plan_file, proof_lines
from prefect_rlhf.placement.devices.axes import OFFERED
from prefect_rlhf.placement.graph import DataflowGraph
from prefect_rlhf.placement.layout.alignment import aligned
from prefect_rlhf.placement.models.model import ModelSpec
from prefect_rlhf.placement.plan import ExecutionPlan
from prefect_rlhf.placement.planner.explain import Explanation, in_words
from prefect_rlhf.placement.planner.planned import Planned
from prefect_rlhf.placement.planner.question import Question
from prefect_rlhf.placement.planner.sweep import Sweep
from prefect_rlhf.placement.plans.plan_file import plan_json
from prefect_rlhf.placement.plans.presets import PRESETS
from prefect_rlhf.placement.schedule.estimate import Estimate
from prefect_rlhf.placement.schedule.throughput import CallSpeed, IterationWork, call_speeds
from prefect_rlhf.tasks.reporting.pictures.memory import memory_svg
from prefect_rlhf.tasks.reporting.pictures.plan import plan_svg
from prefect_rlhf.tasks.reporting.pictures.speeds import money, speed_rows, with_speeds
from prefect_rlhf.tasks.reporting.pictures.sweep import sweep_svg
from prefect_rlhf.tasks.reporting.pictures.text import plan_rows

SCREEN = ("call", "engine", "mesh", *OFFERED, "rows", "micro-batches", "seconds", "share", "MFU")
"""Columns of the plan on the screen, as far as the plan has them; other decisions of a call are in a last column."""
LEFT_OUT = ("runs", "role", "tokens/s")


@dataclass(frozen=True, slots=True)
class Section:
    """A heading, and text in columns."""

    title: str
    text: str


@dataclass(frozen=True)
class PlanAnswer:
    """A plan, with its question and its explanations."""

    question: Question
    planned: Planned
    explanations: tuple[Explanation, ...] = ()
    sweep: Sweep | None = None
    given: GivenPlan | None = None
    dollars_per_hour: float | None = None
    states_imbalance: bool = False  # of experts: the options state it, so it is not assumed
    steps: int = STEPS
    command: str = ""
    is_explained: bool = False

    @cached_property
    def work(self) -> IterationWork:
        """The work of an iteration, and its devices' price."""
        return IterationWork.of(self.question.graph, self.question.workload, self.dollars_per_hour)

    @cached_property
    def speeds(self) -> Mapping[str, CallSpeed]:
        """Each call's speed under the plan, by call name."""
        return self._speeds(self.planned.estimate)

    @cached_property
    def public_range(self) -> Range | None:
        """How long public runs of this kind would take; None if no such run is on record."""
        return public_range(self.question, self.planned.plan)

    @cached_property
    def first_lines(self) -> Sequence[str]:
        """The first lines: whether it fits, a step's time and price, and the command that runs it (or why none can)."""
        planned = self.planned
        blocked = next(not_run(self.question), "")
        run = blocked or (f"run it{place_of(self.question.site)}: {self.command}" if self.command else "")
        took = steps_line(planned.seconds, self.work, self.steps, self.public_range)
        return [line for line in (fit_line(planned.certificate, planned.plan), took, run) if line]

    @cached_property
    def notes(self) -> Sequence[str]:
        """Lines that a person can act on; obstacles of a run are in the first lines."""
        found = notes(self.question, self.planned, self.work, states_imbalance=self.states_imbalance)
        named = [f"{YOURS} of the command has your models' folders and data"] if YOURS in self.command else []
        return [*(line for line in found if line not in self.first_lines), *named]

    @cached_property
    def sections(self) -> Sequence[Section]:
        """The answer for a person: three lines, the plan, how it compares, and notes."""
        given = self.given
        sections = [
            Section("Answer", "\n".join(self.first_lines)),
            *([Section("Your plan", self._given_text(given))] if given else []),
            *([Section("Sizes", self.sweep.text())] if self.sweep else []),
            Section("Plan", table(self.screen_rows)),
            Section("Beside it", table(self.compared)),
            Section("Notes", "\n".join(self.notes)),
        ]
        return [section for section in sections if section.text]

    @cached_property
    def details(self) -> Sequence[Section]:
        """The background of the answer: question, assumptions, proof, every call, and memory."""
        given, assumed = self.given, assumptions(self.question, self.states_imbalance)
        sections = [
            Section("Question", question_text(self.question)),
            Section("Assumed", "\n".join(f"assumed: {line}" for line in assumed)),
            Section("Proof", "\n".join(proof_lines(self.planned, self.work))),
            Section("Calls", table(self.plan_rows)),
        ]
        if self.explanations:
            sections.append(Section("Why", explanation_text(self.explanations)))
        sections.append(Section("Memory", self.planned.certificate.table()))
        return [*sections, *([Section("Memory of your plan", given.certificate.table())] if given else [])]

    @cached_property
    def screen_rows(self) -> list[dict[str, str]]:
        """The model calls of every step as table rows: devices, strategy, speed."""
        graph, plan = self.question.graph, self.planned.plan
        rows = []
        for call, row in zip(graph, self.plan_rows, strict=True):
            if call.role is None or call.every is not None:
                continue
            shown = {name: row[name] for name in SCREEN if name in row}
            if row.get("micro-batches"):
                shown["micro-batches"] = rows_of_a_micro_batch(call, plan[call.name])
            others = (name for name in row if name not in (*SCREEN, *LEFT_OUT) and row[name])
            words = [name if row[name] == "yes" else f"{name} {row[name]}" for name in others]
            words = [word for word in words if word != "mini-batches 1"]
            rows.append(shown | {"words": ", ".join(words)})
        return [{name: row[name] for name in row if any(other[name] for other in rows)} for row in rows]

    @cached_property
    def compared(self) -> list[dict[str, str]]:
        """The plan and the presets as rows of a table; presets with the same plan share a row."""
        rows = self.planned.rows(*([self.given.row] if self.given else []), work=self.work)
        placements: dict[str, object] = {
            result.name: result.plan.placements for result in self.planned.presets if result.plan
        }
        found: dict[object, dict[str, str]] = {}
        for row in rows:
            name, seconds = row["plan"], row["seconds"]
            what = PRESETS[name].what if name in PRESETS else ""
            shown = {"plan": name, "seconds a step": seconds, "against it": row["against auto"]}
            if self.dollars_per_hour is not None:
                dollars = "-" if seconds == "-" else money(self.dollars_per_hour * float(seconds) / 3600)
                shown["$ a step"] = dollars
            same = placements.get(name, name)
            if same in found:
                found[same]["plan"] += f", {name}"
                continue
            found[same] = shown | {"note": row["note"], "what it is": what}
        shown_rows = list(found.values())
        return [{name: row[name] for name in row if any(other[name] for other in shown_rows)} for row in shown_rows]

    @cached_property
    def plan_rows(self) -> list[dict[str, str]]:
        """The plan as table rows, with each call's speed."""
        graph = self.question.graph
        return with_speeds(plan_rows(without_orders(self.planned.plan, graph), graph), self.speeds)

    def _given_text(self, given: GivenPlan) -> str:
        speeds = table(speed_rows(self._speeds(given.estimate).values()))
        return "\n\n".join([given.text(self.planned), speeds, self._table(given.plan)])

    def _speeds(self, estimate: Estimate) -> dict[str, CallSpeed]:
        question = self.question
        sources = question.site.sources
        return call_speeds(question.graph, estimate.plan, estimate.schedule, question.workload, sources)

    def _table(self, plan: ExecutionPlan) -> str:
        graph = self.question.graph
        return table(plan_rows(without_orders(plan, graph), graph))

    @cached_property
    def files(self) -> Mapping[str, str]:
        """Each file's name and content, apart from the report. The plan file begins with its summary as comments."""
        plan = without_orders(self.planned.plan, self.question.graph)
        files = {
            "plan.yaml": plan_file(self.planned, plan, self.work),
            "plan.json": plan_json(plan, figures(self.planned, self.work, self.speeds)) + "\n",
            "certificate.json": self.planned.certificate.to_json() + "\n",
            "timeline.svg": plan_svg(self.planned.estimate) + "\n",
            "memory.svg": memory_svg(self.planned.certificate, plan.cluster) + "\n",
        }
        if self.given:
            files |= {
                "your_certificate.json": self.given.certificate.to_json() + "\n",
                "your_timeline.svg": plan_svg(self.given.estimate) + "\n",
                "your_memory.svg": memory_svg(self.given.certificate, self.given.plan.cluster) + "\n",
            }
        if self.sweep:
            files |= {"sweep.json": self.sweep.to_json() + "\n", "sweep.svg": sweep_svg(self.sweep) + "\n"}
        return files

    def text(self) -> str:
        """Return the answer for a terminal; if it `is_explained`, with its proof."""
        shown = [*self.sections, *(self.details if self.is_explained else ())]
        return "\n\n".join(section.text for section in shown)

    def to_json(self, paths: Mapping[str, Path]) -> str:
        """Return the answer as JSON, with the files' paths."""
        planned, plan = self.planned, without_orders(self.planned.plan, self.question.graph)
        return json.dumps(
            {
                "fits": planned.certificate.fits,
                "lines": self.first_lines,
                "seconds_a_step": planned.seconds,
                "dollars_a_step": self.dollars_per_hour and self.dollars_per_hour * planned.seconds / 3600,
                "steps": self.steps,
                "command": self.command,
                "plan": json.loads(plan_json(plan, figures(planned, self.work, self.speeds))),
                "beside_it": self.compared,
                "notes": self.notes,
                "sizes": json.loads(self.sweep.to_json()) if self.sweep else None,
                "files": {name: str(path) for name, path in paths.items()},
            },
            indent=1,
        )

    def markdown(self) -> str:
        """Return the answer as a page that links the pictures next to it."""
        parts = [f"## {section.title}\n\n```text\n{section.text}\n```" for section in (*self.sections, *self.details)]
        pictures = [f"![{name}]({name})" for name in self.files if name.endswith(".svg")]
        return "\n\n".join([f"# Plan of {self.question.graph.name}", *parts, *pictures]) + "\n"

    def write(self, folder: Path) -> dict[str, Path]:
        """Write every file; returns their paths by name."""
        folder.mkdir(parents=True, exist_ok=True)
        contents = {**self.files, "report.md": self.markdown()}
        for name, content in contents.items():
            (folder / name).write_text(content)
        return {name: folder / name for name in contents}


def figures(planned: Planned, work: IterationWork, speeds: Mapping[str, CallSpeed]) -> dict[str, Any]:
    """Return a plan's figures for machines: for an iteration, and for each call by name."""
    fullest, seconds = planned.certificate.fullest, planned.seconds
    return {
        "seconds": seconds,
        "lower_bound_seconds": planned.lower_bound_seconds,
        "gap": planned.gap,
        "tokens_per_second": work.tokens / seconds,
        "response_tokens_per_second": work.response_tokens / seconds,
        "samples_per_second": work.samples / seconds,
        "depends_most_on": asdict(planned.dependence) if planned.dependence else None,
        "dollars_per_hour": work.dollars_per_hour,
        "dollars_per_million_response_tokens": work.dollars_per_million(seconds),
        "fullest_device_bytes": fullest.num_bytes if fullest else 0,
        "fullest_device_share": planned.certificate.used_share(planned.plan.cluster.kept_share),
        "calls": {name: {k: v for k, v in asdict(speed).items() if k != "call"} for name, speed in speeds.items()},
    }


def without_orders(plan: ExecutionPlan, graph: DataflowGraph) -> ExecutionPlan:
    """Return the plan without device orders if a run would choose the same orders, because it is shorter to read."""
    plain = replace(plan, placements=tuple((name, replace(old, device_order=())) for name, old in plan.placements))
    return plain if aligned(plain, graph) == plan else plan


def explanation_text(explanations: Sequence[Explanation]) -> str:
    """Return three lines for each call."""
    return "\n".join(
        f"{explanation.call}: {in_words(explanation.placement)}, {explanation.seconds:.3g} s\n"
        f"    {explanation.why()}\n    runner-up: {explanation.costs()}"
        for explanation in explanations
    )


def question_text(question: Question) -> str:
    """Describe the question, with the values that were filled in."""
    graph, cluster, workload = question.graph, question.site.cluster, question.workload
    nodes = question.site.sources.nodes
    kinds = " and ".join(dict.fromkeys(node.device.name for node in nodes))
    network = f", network {nodes[0].network.name}" if nodes[0].network else ""
    rows = max(call.num_rows for call in graph if call.every is None)
    count, times = question.site.mesh.num_devices, origin(question.site.sources)
    models = [
        {
            "role": model.role,
            "model": model.path,
            "layers": str(model.shape.num_layers),
            "hidden": str(model.shape.hidden_size),
            "head": model.head,
            "format": model.dtype,
            "trained": _trained(model, graph),
        }
        for model in graph.models
    ]
    return "\n".join(
        [
            f"{graph.name} on {count} device{'s' if count > 1 else ''} ({question.site.mesh.name} of "
            f"{cluster.num_nodes} x {cluster.devices_per_node}, {kinds}{network}); times: {times}",
            f"{rows} rows per step, prompts of {workload.prompts.mean:.0f} and responses of "
            f"{workload.responses.mean:.0f} tokens on average, at most {workload.longest} together",
            table(models),
            *not_run(question),
            *filter(None, [uneven_batch(question)]),
        ]
    )


def _trained(model: ModelSpec, graph: DataflowGraph) -> str:
    if model.follows is not None:
        own = f"adapter of rank {model.adapter.rank}, " if model.adapter is not None else ""
        return f"{own}follows {model.follows.leader}"
    if model.adapter is not None:
        kept = "" if graph.trained_by(model.role) else ", not trained"
        return f"adapter of rank {model.adapter.rank}{kept}"
    return "yes" if graph.trained_by(model.role) else ""
