"""From a question to its answer: read it, plan, explain and sweep where that was asked."""

from __future__ import annotations

from collections.abc import Callable

from prefect_rlhf.flows.find_flow import find_flow
from prefect_rlhf.flows.plan_options import PlanOptions
from prefect_rlhf.flows.plan_report import Answer
from prefect_rlhf.flows.what_if import WhatIf, what_if
from prefect_rlhf.placement.explain import explain
from prefect_rlhf.placement.planner import Planned, plan_graph
from prefect_rlhf.placement.search.driver import Progress

Show = Callable[[Progress], None]


def ask(options: PlanOptions, progress: Show | None = None) -> Answer:
    """Raises InvalidInput or GraphError, one line, for what cannot be planned."""
    question = what_if(find_flow(options.algorithm), options)
    found = planned(question, options, progress)
    why = explain(question.planner, found.plan, found.estimate) if options.explain else ()
    return Answer(question, found, why)


def planned(question: WhatIf, options: PlanOptions, progress: Show | None) -> Planned:
    """The best plan of a question."""
    where = question.site
    return plan_graph(
        question.graph,
        where.cluster,
        where.mesh,
        question.workload,
        where.sources,
        options.budget_seconds,
        options.method,
        where.kind,
        progress,
    )
