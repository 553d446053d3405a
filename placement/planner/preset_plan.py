"""A preset's best plan: its strategies and micro-batches, searched within its meshes."""

from collections.abc import Iterator, Mapping, Set
from dataclasses import replace
from itertools import product

from prefect_rlhf.errors.errors import InvalidInput, RlhfError
from prefect_rlhf.placement.devices.mesh import Backend, ClusterShape, DeviceMesh
from prefect_rlhf.placement.devices.strategy import Strategy
from prefect_rlhf.placement.graph import Call, DataflowGraph
from prefect_rlhf.placement.memory.certificate import Certificate
from prefect_rlhf.placement.memory.fit import longest_rows, offload_to_fit
from prefect_rlhf.placement.memory.remedies import refusal, remedies
from prefect_rlhf.placement.plan import ExecutionPlan, Placement
from prefect_rlhf.placement.planner.planned import PresetResult
from prefect_rlhf.placement.planner.question import Question
from prefect_rlhf.placement.planner.solution import TIGHTER, solve_fitting
from prefect_rlhf.placement.planner.space.candidates import Candidate, Candidates, CostContext, candidate
from prefect_rlhf.placement.planner.space.plan_problem import PlanProblem, PlanSpace, restricted_problem
from prefect_rlhf.placement.plans.check import able_engines, violations
from prefect_rlhf.placement.plans.presets import Preset, preset_named
from prefect_rlhf.placement.plans.streaming import in_parts
from prefect_rlhf.placement.search.budget import Budget

MOST_CUTS = 64  # micro-batches of a preset that cuts all calls alike, unless its first number is larger
DEFAULT_SEQUENCE_LENGTH = 1024  # tokens of the longest row, if it is unknown


def preset(
    name: str,
    graph: DataflowGraph,
    cluster: ClusterShape,
    mesh: DeviceMesh,
    max_sequence_length: int = DEFAULT_SEQUENCE_LENGTH,
    backend: Backend = "cuda",
) -> ExecutionPlan:
    """Return the plan that a preset gives `graph` on `mesh`: as much data parallelism as is legal and fits.

    Rows have at most `max_sequence_length` tokens. If memory is short, frozen roles are offloaded, and then models are
    split over more devices. Raises InvalidInput if no legal plan exists or no plan fits.
    """
    rule = preset_named(name)
    cluster.check_mesh(mesh)
    cluster = replace(cluster, backend=backend)
    workload = longest_rows(graph, max_sequence_length)
    refused: list[InvalidInput] = []
    too_large: list[tuple[ExecutionPlan, Certificate]] = []
    for least in (n for n in range(1, mesh.num_devices + 1) if mesh.num_devices % n == 0):
        try:
            placements = tuple((call.name, _place(call, rule, mesh, graph, least, backend)) for call in graph)
        except InvalidInput as error:
            refused.append(error)
            continue
        whole = ExecutionPlan(name, cluster, placements)
        # Calls of parts run at the same time, so their plan may need more memory than the plan without parts.
        for given in dict.fromkeys((in_parts(graph, whole, rule.parts), whole)):
            plan, certificate = offload_to_fit(given, graph, workload, backend)
            if certificate.fits:
                return plan
            too_large.append((plan, certificate))
    if too_large:
        plan, certificate = too_large[0]
        raise refusal(plan, certificate, remedies(plan, certificate, graph, workload, backend))
    first = refused[0]
    other = f"; {name} has no plan on {mesh.name}, auto and flattening may have" if name != "flattening" else ""
    raise InvalidInput(first.field, first.seen, f"{first.expected}{other}")


def _place(
    call: Call, rule: Preset, lease: DeviceMesh, graph: DataflowGraph, least: int, backend: Backend
) -> Placement:
    """The first legal strategy that splits the call's model over at least `least` devices, or over all of its mesh.

    A strategy that gives each replica an item of each mini-batch precedes a strategy that leaves some replicas idle.
    """
    mesh = rule.mesh(call, lease, graph)
    if call.kind == "compute":
        return Placement(DeviceMesh(mesh.first_node, 1, mesh.first_device, 1), Strategy(), "python")
    engine = able_engines(call, graph, backend, rule.engines(call))[0]
    refused: list[InvalidInput] = []
    by_idle = sorted(rule.strategies(mesh), key=lambda strategy: strategy.dp * call.mini_batches > call.num_items)
    for strategy in by_idle:
        if strategy.tp * strategy.pp < min(least, mesh.num_devices):
            continue
        placement = Placement(mesh, strategy, engine)
        violation = next(violations(call, placement, graph, backend), None)
        if violation is None:
            return placement
        refused.append(violation)
    why = f" ({refused[0]})" if refused else ""
    raise InvalidInput("mesh", lease.name, f"devices that can run {call.name}{why}")


def preset_result(question: Question, space: PlanSpace, name: str, budget: Budget) -> PresetResult:
    """Search the best strategies that a preset admits, on the meshes that it gives to the calls."""
    try:
        plan = best_admitted(question, space, name, preset_named(name), budget)
    except RlhfError as error:
        return PresetResult(name, refused=str(error).splitlines()[0])
    if plan is None:
        return PresetResult(name, refused="no strategies on its meshes fit the devices' memory")
    return PresetResult(name, plan, question.estimate(plan))


def best_admitted(
    question: Question, space: PlanSpace, name: str, rule: Preset, budget: Budget
) -> ExecutionPlan | None:
    """Return the best plan that a preset admits, in its parts if they fit; None: no plan fits.

    Raises InvalidInput if the mesh has no such parts, or a call cannot run on its part.
    """
    for problem in preset_problems(rule, question.site.mesh, space):
        plan = solve_fitting(question, problem, budget, name=name, shares=TIGHTER, repair=False)
        if plan is not None:
            streamed = in_parts(question.graph, plan, rule.parts)
            return streamed if question.fits(streamed) else plan
    return None


def preset_problems(rule: Preset, mesh: DeviceMesh, space: PlanSpace) -> Iterator[PlanProblem]:
    """Yield a preset's problems in order of preference; the first with a plan defines the preset's plan.

    A symmetric preset has a problem for each strategy. If it cuts all calls alike, each strategy comes with the fewest
    micro-batches first, then with more. Raises InvalidInput if the mesh has no such parts, or a call cannot run on its
    part.
    """
    graph = space.context.graph
    meshes = {call: rule.mesh(graph.call(call), mesh, graph) for call in space.candidates}
    refused: list[InvalidInput] = []
    strategies = tuple(rule.strategies(mesh)) if rule.symmetric else (None,)
    for cuts, strategy in product(_numbers_of_cuts(rule, mesh, space.context), strategies):
        allowed = {
            call: frozenset(rule.strategies(on) if strategy is None else (strategy,)) for call, on in meshes.items()
        }

        def admits(call: Call, placement: Placement, allowed: Mapping[str, Set[Strategy]] = allowed) -> bool:
            dense = replace(placement.strategy, ep=1)  # experts may lie as suits the call
            return placement.engine in rule.engines(call) and dense in allowed[call.name]

        options = space
        if cuts is not None and strategy is not None:
            options = replace(space, candidates=_cut_alike(rule, strategy, cuts, meshes, space))
        try:
            yield restricted_problem(options, meshes, admits)
        except InvalidInput as error:
            refused.append(error)
    if refused:
        raise refused[-1]


def _numbers_of_cuts(rule: Preset, mesh: DeviceMesh, context: CostContext) -> Iterator[int | None]:
    """The numbers of micro-batches that all calls may have; None if each call has its own."""
    if rule.micro_batch_tokens is None:
        yield None
        return
    rows = max(call.num_rows for call in context.graph if call.role is not None)
    tokens, cuts = rows * context.question.workload.mean_length, 1
    while tokens > cuts * rule.micro_batch_tokens * mesh.num_devices:
        cuts *= 2
    most = max(cuts, MOST_CUTS)
    while cuts <= most:
        yield cuts
        cuts *= 2


def _cut_alike(
    rule: Preset, strategy: Strategy, micro_batches: int, meshes: Mapping[str, DeviceMesh], space: PlanSpace
) -> Candidates:
    """The candidate of every call with this strategy, if it is legal, and its mesh is allowed for the call."""
    context, candidates = space.context, dict[str, tuple[Candidate, ...]]()
    graph, backend = context.graph, context.site.backend
    for name, mesh in meshes.items():
        call = graph.call(name)
        engine = able_engines(call, graph, backend, rule.engines(call))[0]
        placement = Placement(mesh, strategy, engine, micro_batches)
        of_mesh = context.space.class_of(context.space.meshes.index(mesh))
        may_have = any(option.mesh_class == of_mesh for option in space.candidates[name])
        legal = may_have and not any(violations(call, placement, graph, backend))
        candidates[name] = (candidate(call, placement, context),) if legal else ()
    return candidates
