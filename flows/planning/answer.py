"""From a question to its answer: read it, plan, explain and sweep where that was asked."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from prefect_rlhf.flows.forms.plan_options import PlanOptions
from prefect_rlhf.flows.hardware.cluster_spec import parse_cluster, site
from prefect_rlhf.flows.planning.plan_report import PlanAnswer
from prefect_rlhf.flows.planning.what_if import WhatIf, what_if
from prefect_rlhf.flows.rlhf_flow import find_flow
from prefect_rlhf.placement.errors import InvalidInput
from prefect_rlhf.placement.planner.best_plan import plan_graph
from prefect_rlhf.placement.planner.explain import explain
from prefect_rlhf.placement.planner.planned import Planned
from prefect_rlhf.placement.planner.sweep import Sweep, check_sizes, sweep
from prefect_rlhf.placement.search.driver import Progress

Show = Callable[[Progress], None]


def answer_question(options: PlanOptions, progress: Show | None = None) -> PlanAnswer:
    """Raises InvalidInput or GraphError, one line, for what cannot be planned."""
    check_sizes(options.sweep)
    question = what_if(find_flow(options.algorithm), options)
    found = search_best_plan(question, options, progress)
    why = explain(question.planner, found.plan, found.estimate, found.candidates) if options.explain else ()
    return PlanAnswer(question, found, why, sweep_sizes(question, found, options, progress) if options.sweep else None)


def search_best_plan(question: WhatIf, options: PlanOptions, progress: Show | None) -> Planned:
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


def sweep_sizes(question: WhatIf, found: Planned, options: PlanOptions, progress: Show | None) -> Sweep:
    """The question on other numbers of its nodes, which are all of one kind."""
    groups = parse_cluster(options.cluster) if options.cluster else ()
    if len(groups) != 1:
        raise InvalidInput("sweep", options.cluster, "a cluster of one kind of node, such as 4x8:h100")

    def on(num_nodes: int) -> Planned:
        if num_nodes == groups[0].num_nodes:
            return found
        where = site([replace(groups[0], num_nodes=num_nodes)], options.network, options.device_memory_gib)
        resized = replace(question, site=where.with_profiles(question.site.sources.profiles))
        return search_best_plan(resized, options, progress)

    return sweep([*options.sweep, groups[0].num_nodes], groups[0].devices_per_node, on)
