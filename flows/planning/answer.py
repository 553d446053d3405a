"""From a question to its answer: read it, plan, and, if requested, explain it and compare clusters."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from prefect_rlhf.errors.errors import InvalidInput, TooLittleMemory
from prefect_rlhf.flows.algorithm.rlhf_flow import find_flow
from prefect_rlhf.flows.forms.check import checked_value
from prefect_rlhf.flows.forms.options import RunOptions
from prefect_rlhf.flows.forms.plan_options import PlanOptions
from prefect_rlhf.flows.hardware.cluster_spec import Groups
from prefect_rlhf.flows.hardware.described_device import read_device
from prefect_rlhf.flows.hardware.prices import check_all_used, check_prices, dollars_per_hour
from prefect_rlhf.flows.planning.clusters import cluster_size, named_cluster, questions_by_cluster, read_clusters
from prefect_rlhf.flows.planning.given_plan import given_plan
from prefect_rlhf.flows.planning.more_devices import enough_devices, with_enough_devices
from prefect_rlhf.flows.planning.plan_report import PlanAnswer
from prefect_rlhf.flows.planning.what_if import read_question
from prefect_rlhf.placement.devices.mesh import DeviceMesh
from prefect_rlhf.placement.graph import DataflowGraph
from prefect_rlhf.placement.plan import ExecutionPlan
from prefect_rlhf.placement.planner.best_plan import plan_graph
from prefect_rlhf.placement.planner.explain import explain
from prefect_rlhf.placement.planner.planned import Planned
from prefect_rlhf.placement.planner.question import Question
from prefect_rlhf.placement.planner.sweep import ClusterSize, SizedPlan, check_sizes, smallest_cluster, sweep
from prefect_rlhf.placement.plans.stated_words import Words, check_calls
from prefect_rlhf.placement.schedule.throughput import iteration_utilisation
from prefect_rlhf.placement.search.driver import Progress

ShowProgress = Callable[[Progress], None]


def answer_question(options: PlanOptions, progress: ShowProgress | None = None) -> PlanAnswer:
    """Plan according to the options.

    Raises InvalidInput or GraphError with a single-line message if no plan is possible. If a plan is given, the report
    of a PlanDoesNotFit includes its price.
    """
    check_sizes(options.sweep)
    clusters = read_clusters(options)
    question = read_question(find_flow(options.algorithm), options)
    questions = questions_by_cluster(question, options, clusters)
    prices = check_prices(options.prices, read_device(options.device))
    sources = [each.site.sources for each in (questions.values() if questions else [question])]
    check_all_used(prices, [node for each in sources for node in each.nodes])
    for each in sources:
        dollars_per_hour(each.nodes, prices)  # raises if a kind lacks its price, before a search
    if questions:
        return _answer_with_table(clusters, questions, options, prices, progress)
    return _answer(question, options, prices, progress)


def _answer(
    question: Question,
    options: PlanOptions,
    prices: Mapping[str, float],
    progress: ShowProgress | None,
    in_table: bool = False,
) -> PlanAnswer:
    """The answer for the question's own cluster. A refusal states how many devices are enough, unless a table does."""
    given = given_plan(options.plan, question)
    try:
        planned = _planned(question, options, progress, None if given is None else given.plan)
    except InvalidInput as error:
        refused = error
        if isinstance(error, TooLittleMemory) and not in_table:
            refused = with_enough_devices(error, question, options)
        if given is not None:
            refused = given.beside(refused)
        if refused is error:
            raise
        raise refused from error
    explanations = explain(question, planned) if options.explain else ()
    price = dollars_per_hour(question.site.sources.nodes, prices)
    states_imbalance = options.expert_imbalance is not None
    return PlanAnswer(question, planned, explanations, None, given, price, states_imbalance)


def _answer_with_table(
    clusters: Sequence[Groups],
    questions: Mapping[ClusterSize, Question],
    options: PlanOptions,
    prices: Mapping[str, float],
    progress: ShowProgress | None,
) -> PlanAnswer:
    """The answer for the named cluster, or for the smallest that suffices, with the table of all clusters.

    If no cluster has enough memory, the refusal states how many devices of each kind are enough.
    """
    named, plain = named_cluster(options), options.model_copy(update={"plan": "", "explain": False})
    answers: dict[ClusterSize, PlanAnswer] = {}

    def planned_on(size: ClusterSize) -> SizedPlan:
        question = questions[size]
        if size not in answers:
            mine = options if size == named else plain
            answers[size] = _answer(question, mine, prices, progress, in_table=size != named)
        answer, site = answers[size], question.site
        used = iteration_utilisation(question.graph, answer.planned.seconds, question.workload, site.sources, site.mesh)
        fullest = answer.planned.certificate.used_share(site.cluster.headroom)
        return SizedPlan(answer.planned, answer.work, fullest, used)

    if named is not None:
        planned_on(named)  # first: its refusal is the answer
    by_name = {size.name: size for size in questions}
    try:
        table = sweep(questions, planned_on, options.at_least)
        smallest = by_name[smallest_cluster(table).cluster] if named is None else named
    except TooLittleMemory as error:
        words = enough_devices({groups: questions[cluster_size(groups)] for groups in clusters}, options)
        if not words:
            raise
        raise error.also(words) from error
    answer = answers[smallest]
    explanations = explain(answer.question, answer.planned) if options.explain else ()
    return replace(answer, sweep=table, explanations=explanations)


def _planned(
    question: Question, options: PlanOptions, progress: ShowProgress | None, start: ExecutionPlan | None = None
) -> Planned:
    pins, budget_seconds = read_pins(options.pins), options.budget_seconds
    words = read_words(options, question.graph)
    return plan_graph(question, budget_seconds, options.method, progress, pins, options.evaluations, start, words=words)


def read_words(options: PlanOptions, graph: DataflowGraph) -> Words:
    """Return the words of placements among the parameters. Raises InvalidInput for wrong words and calls."""
    parameter = next(each for each in RunOptions.signature() if each.name == "placement")
    stated = checked_value(parameter, options.parameters.get("placement", {}))
    words = {call: placed.stated for call, placed in stated.items() if placed.stated}
    check_calls(words, graph)
    return words


def read_pins(pins: Mapping[str, str]) -> dict[str, DeviceMesh]:
    """Return the mesh that each pinned call must use. Raises InvalidInput for an invalid mesh."""
    return {call: DeviceMesh.parse(mesh, f"pins.{call}") for call, mesh in pins.items()}
