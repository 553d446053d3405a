"""From a question to its answer: read it, plan, and, if requested, explain and sweep."""

from collections.abc import Callable, Mapping
from dataclasses import replace

from prefect_rlhf.errors.errors import InvalidInput
from prefect_rlhf.flows.algorithm.rlhf_flow import find_flow
from prefect_rlhf.flows.forms.plan_options import PlanOptions
from prefect_rlhf.flows.hardware.cluster_spec import parse_cluster, site_of
from prefect_rlhf.flows.hardware.described_device import read_device
from prefect_rlhf.flows.hardware.prices import check_all_used, check_prices, dollars_per_hour
from prefect_rlhf.flows.planning.given_plan import given_plan
from prefect_rlhf.flows.planning.plan_report import PlanAnswer
from prefect_rlhf.flows.planning.what_if import read_question
from prefect_rlhf.placement.devices.mesh import DeviceMesh
from prefect_rlhf.placement.planner.best_plan import plan_graph
from prefect_rlhf.placement.planner.explain import explain
from prefect_rlhf.placement.planner.planned import Planned
from prefect_rlhf.placement.planner.question import Question
from prefect_rlhf.placement.planner.sweep import Sweep, check_sizes, sweep
from prefect_rlhf.placement.search.driver import Progress

ShowProgress = Callable[[Progress], None]


def answer_question(options: PlanOptions, progress: ShowProgress | None = None) -> PlanAnswer:
    """Plan according to the options.

    Raises InvalidInput or GraphError with a single-line message if no plan is possible. If a plan is given, the report
    of a PlanDoesNotFit includes its price.
    """
    check_sizes(options.sweep)
    question = read_question(find_flow(options.algorithm), options)
    prices = check_prices(options.prices, read_device(options.device))
    nodes = question.site.sources.nodes
    check_all_used(prices, nodes)
    price = dollars_per_hour(nodes, prices)
    given = given_plan(options.plan, question)
    try:
        planned = _planned(question, options, progress)
    except InvalidInput as error:
        if given is None:
            raise
        raise given.beside(error) from error
    explanations = explain(question, planned) if options.explain else ()
    sizes = sweep_sizes(question, planned, options, progress) if options.sweep else None
    return PlanAnswer(question, planned, explanations, sizes, given, price)


def _planned(question: Question, options: PlanOptions, progress: ShowProgress | None) -> Planned:
    pins, budget_seconds = read_pins(options.pins), options.budget_seconds
    return plan_graph(question, budget_seconds, options.method, progress, pins, options.evaluations)


def read_pins(pins: Mapping[str, str]) -> dict[str, DeviceMesh]:
    """Return the mesh that each pinned call must use. Raises InvalidInput for an invalid mesh."""
    return {call: DeviceMesh.parse(mesh, f"pins.{call}") for call, mesh in pins.items()}


def sweep_sizes(question: Question, planned: Planned, options: PlanOptions, progress: ShowProgress | None) -> Sweep:
    """Plan the question for other numbers of nodes. Raises InvalidInput unless all nodes are of the same kind."""
    groups = parse_cluster(options.cluster, read_device(options.device)) if options.cluster else ()
    if len(groups) != 1:
        raise InvalidInput("sweep", options.cluster, "a cluster with a single kind of node, such as 4x8:h100")

    def planned_on(num_nodes: int) -> Planned:
        if num_nodes == groups[0].num_nodes:
            return planned
        site = site_of(
            [replace(groups[0], num_nodes=num_nodes)],
            options.network,
            options.device_memory_gib,
            options.call_seconds,
            options.host_memory_gib,
        )
        resized = replace(question, site=site.with_profiles(question.site.sources.profiles))
        return _planned(resized, options, progress)

    return sweep([*options.sweep, groups[0].num_nodes], groups[0].devices_per_node, planned_on)
