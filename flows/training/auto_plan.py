"""`plan: auto`: search a plan for the leased mesh before the run, say how good it is, and remember it.

A remembered plan is a plan file whose first lines say what was known of it; its name is a hash of the whole question.
"""

from __future__ import annotations

import hashlib
import os
from importlib.metadata import version
from pathlib import Path

from prefect_rlhf.flows.hardware.profiles import describe_sources, measured_sources
from prefect_rlhf.flows.training.log import LogLine
from prefect_rlhf.flows.training.searched_plan import plan_file, summary
from prefect_rlhf.placement.cost.sources import CostSources
from prefect_rlhf.placement.cost.workload import Workload
from prefect_rlhf.placement.errors import InvalidInput
from prefect_rlhf.placement.graph import DataflowGraph
from prefect_rlhf.placement.lease import Lease
from prefect_rlhf.placement.plan import ExecutionPlan
from prefect_rlhf.placement.planner.best_plan import plan_graph
from prefect_rlhf.placement.planner.planned import Planned
from prefect_rlhf.placement.plans.check import check_plan
from prefect_rlhf.placement.plans.plan_file import read_plan

AUTO = "auto"
BUDGET_SECONDS = 5.0
PLANS = Path("~/.prefect-rlhf/plans")


def auto_plan(graph: DataflowGraph, held: Lease, workload: Workload, say: LogLine) -> ExecutionPlan:
    """The best plan known for this graph on this lease; found now, or by an earlier run of the same."""
    sources = measured_sources(graph.models, held)
    file = PLANS.expanduser() / f"{question(graph, held, workload, sources)}.yaml"
    known = remembered(file, graph, held, say)
    if known is not None:
        return known
    found = search_plan(graph, held, workload, sources, say)
    remember(file, found)
    return found.plan


def search_plan(graph: DataflowGraph, held: Lease, workload: Workload, sources: CostSources, say: LogLine) -> Planned:
    """Search for some seconds, and say what was found."""
    say(describe_sources(sources))
    found = plan_graph(
        graph,
        held.cluster,
        held.mesh,
        workload,
        sources,
        BUDGET_SECONDS,
        kind=held.kind,
        progress=lambda p: say(str(p)),
    )
    say(summary(found))
    return found


def question(graph: DataflowGraph, held: Lease, workload: Workload, sources: CostSources) -> str:
    """A hash of all that an automatic plan depends on: values whose texts are equal when they are."""
    known = (graph, held.cluster, held.mesh, held.kind, workload, sources, BUDGET_SECONDS, version("prefect-rlhf"))
    return hashlib.sha256(repr(known).encode()).hexdigest()[:32]


def remembered(file: Path, graph: DataflowGraph, held: Lease, say: LogLine) -> ExecutionPlan | None:
    """The plan in `file`, if there is one that can still be run."""
    if not file.is_file():
        return None
    try:
        plan = check_plan(read_plan(file, held.cluster), graph, held.mesh)
    except InvalidInput as error:
        say(f"{file} holds no plan for this run, so one is searched anew ({error})")
        return None
    lines = [line.removeprefix("# ") for line in file.read_text().splitlines() if line.startswith("# ")]
    say("\n".join([f"found before: {file}", *lines]))
    return plan


def remember(file: Path, found: Planned) -> None:
    """Write the plan and what is known of it; beside, then renamed, since runs may plan at the same time."""
    file.parent.mkdir(parents=True, exist_ok=True)
    beside = file.with_suffix(f".{os.getpid()}")
    beside.write_text(plan_file(found, found.plan))
    beside.replace(file)
