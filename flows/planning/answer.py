"""Answers a question: read it, plan and, if requested, explain the plan and compare clusters."""

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
from prefect_rlhf.flows.planning.first_screen import planned_steps, run_command
from prefect_rlhf.flows.planning.given_plan import given_plan
from prefect_rlhf.flows.planning.more_devices import enough_devices, with_enough_devices
from prefect_rlhf.flows.planning.plan_report import PlanAnswer
from prefect_rlhf.flows.planning.what_if import read_question
from prefect_rlhf.placement.devices.mesh import DeviceMesh
from prefect_rlhf.placement.graph import DataflowGraph
from prefect_rlhf.placement.plan import ExecutionPlan
from prefect_rlhf.placement.planner.attempts import NEARLY
from prefect_rlhf.placement.planner.best_plan import plan_graph
from prefect_rlhf.placement.planner.explain import explain
from prefect_rlhf.placement.planner.planned import Planned
from prefect_rlhf.placement.planner.question import Question
from prefect_rlhf.placement.planner.sweep import ClusterSize, SizedPlan, Sweep, check_sizes, smallest_cluster, sweep
from prefect_rlhf.placement.plans.stated_words import Words, check_calls
from prefect_rlhf.placement.schedule.throughput import iteration_utilisation
from prefect_rlhf.placement.search.driver import Progress

ShowProgress = Callable[[Progress], None]


def answer_question(
    options: PlanOptions, progress: ShowProgress | None = None, stated: Sequence[str] | None = None
) -> PlanAnswer:
    """Plan for these options. `stated` is how the user stated parameters, for the command that runs the plan.

    Raises InvalidInput or GraphError with a single-line message if no plan is possible. If you gave a plan, a
    PlanDoesNotFit reports its price too.
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
        answer = _answer_with_table(clusters, questions, options, prices, progress)
    else:
        answer = _answer(question, options, prices, progress)
    return replace(answer, command=run_command(options, answer.question, stated))


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
        planned = _planned(question, options, progress, None if given is None else given.with_room_of(question))
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
    return PlanAnswer(
        question,
        planned,
        explanations,
        given=given,
        dollars_per_hour=price,
        states_imbalance=states_imbalance,
        steps=planned_steps(options),
        is_explained=options.explain,
    )


def _answer_with_table(
    clusters: Sequence[Groups],
    questions: Mapping[ClusterSize, Question],
    options: PlanOptions,
    prices: Mapping[str, float],
    progress: ShowProgress | None,
) -> PlanAnswer:
    """The answer for the named cluster, or for the smallest that suffices, with the table of all clusters.

    A named cluster without enough memory is a row of the table, and the answer is for the smallest that has enough;
    only a plan file is for the named cluster alone. If no cluster has enough memory, the refusal states how
    many devices of each kind are enough.
    """
    named, plain = named_cluster(options), options.model_copy(update={"plan": "", "explain": False})
    answers: dict[ClusterSize, PlanAnswer] = {}

    def planned_on(size: ClusterSize) -> SizedPlan:
        question = questions[size]
        if size not in answers:
            mine = options if size == named else plain
            answers[size] = _answer(question, mine, prices, progress, in_table=True)
        answer, site = answers[size], question.site
        used = iteration_utilisation(question.graph, answer.planned.seconds, question.workload, site.sources, site.mesh)
        fullest = answer.planned.certificate.used_share(site.cluster.kept_share)
        return SizedPlan(answer.planned, answer.work, fullest, used)

    if named is not None and options.plan:
        planned_on(named)  # first: its refusal is the answer
    by_name = {size.name: size for size in questions}
    try:
        table = sweep(questions, planned_on, options.at_least)
        smallest = named if named in answers and named is not None else by_name[smallest_cluster(table).cluster]
    except TooLittleMemory as error:
        words = enough_devices({groups: questions[cluster_size(groups)] for groups in clusters}, options)
        if not words:
            raise
        raise error.also(words) from error
    table = replace(table, enough=_enough_between(table, clusters, questions, options))
    answer = answers[smallest]
    explanations = explain(answer.question, answer.planned) if options.explain else ()
    return replace(answer, sweep=table, explanations=explanations, is_explained=options.explain)


def _enough_between(
    table: Sweep, clusters: Sequence[Groups], questions: Mapping[ClusterSize, Question], options: PlanOptions
) -> str:
    """How many devices are enough, of each kind with a size that is too small, unless that is a size of the table."""
    found = []
    fits = {row.cluster for row in table.sizes if row.seconds}
    lacks = {row.cluster for row in table.sizes if row.lacks_memory}
    for kind in dict.fromkeys(row.kind for row in table.sizes if row.lacks_memory):
        of_kind = [groups for groups in clusters if cluster_size(groups).kind == kind]
        small = [groups for groups in of_kind if cluster_size(groups).name in lacks]
        largest = max(small, key=lambda groups: cluster_size(groups).num_devices)
        words = enough_devices({largest: questions[cluster_size(largest)]}, options)
        if words and not any(words.endswith(f"as {name}") for name in fits):
            found.append(words)
    return "; ".join(found)


def _planned(
    question: Question, options: PlanOptions, progress: ShowProgress | None, start: ExecutionPlan | None = None
) -> Planned:
    pins, budget_seconds = read_pins(options.pins), options.budget_seconds
    simplicity = NEARLY if options.simplicity is None else options.simplicity
    words = read_words(options, question.graph)
    evaluations, method = options.evaluations, options.method
    return plan_graph(
        question, budget_seconds, method, progress, pins, evaluations, start, words=words, simplicity=simplicity
    )


def read_words(options: PlanOptions, graph: DataflowGraph) -> Words:
    """Return the placement words among the parameters. Raises InvalidInput for wrong words and calls."""
    parameter = next(each for each in RunOptions.signature() if each.name == "placement")
    stated = checked_value(parameter, options.parameters.get("placement", {}))
    words = {call: placed.stated for call, placed in stated.items() if placed.stated}
    check_calls(words, graph)
    return words


def read_pins(pins: Mapping[str, str]) -> dict[str, DeviceMesh]:
    """Return the mesh that each pinned call must use. Raises InvalidInput for an invalid mesh."""
    return {call: DeviceMesh.parse(mesh, f"pins.{call}") for call, mesh in pins.items()}
