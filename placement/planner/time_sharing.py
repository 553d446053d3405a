"""Plans in which every model leaves its devices while others use them: for models that fit only one at a time.

A copy of weights that is made of a trained one needs room for both at once. So such a plan either generates with the
weights that are trained, in their layout, or keeps the copy on other devices.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from prefect_rlhf.placement.cost.call_bytes import static_bytes
from prefect_rlhf.placement.cost.execution import Execution
from prefect_rlhf.placement.cost.sizes import ModelSizes
from prefect_rlhf.placement.graph import Call
from prefect_rlhf.placement.memory.bytes import usable_bytes
from prefect_rlhf.placement.memory.overhead import call_overhead, communicator_bytes
from prefect_rlhf.placement.memory.remedies import with_changes
from prefect_rlhf.placement.plan import ExecutionPlan, instances
from prefect_rlhf.placement.planner.candidates import Candidate, Candidates, CostContext, MemoryBounds
from prefect_rlhf.placement.planner.plan_problem import PlanProblem, PlanSpace, plan_problem
from prefect_rlhf.placement.planner.question import Question
from prefect_rlhf.placement.search.problem import PairNode, ProblemNode

FORBIDDEN = 10**12  # microseconds, of a move for which there is no room


def time_sharing_bound(space: PlanSpace) -> PlanProblem:
    """Pose the relaxed problem in which a model occupies memory only while a call uses it.

    Offloaded candidates, whose time on the host link is known, stand for frozen models. What trained models take over
    the host link counts as nothing, so its bound holds for plans that offload less, too.
    """
    resident: dict[str, tuple[Candidate, ...]] = {}
    offloaded: dict[str, tuple[Candidate, ...]] = {}
    for name, options in space.candidates.items():
        resident[name] = tuple(option for option in options if option.placement.offload == "all") or options
        offloaded[name] = tuple(_offloaded(option, option.least.peak) for option in resident[name])
    return _without_full_moves(plan_problem(space.context, offloaded), resident, space.context)


def time_sharing_problem(space: PlanSpace) -> PlanProblem:
    """Pose the problem whose plans are run: a model stays, or comes for a call and goes after it while devices wait."""
    context = space.context
    resident: dict[str, tuple[Candidate, ...]] = {}
    choices: dict[str, tuple[Candidate, ...]] = {}
    for name, options in space.candidates.items():
        call = context.graph.call(name)
        staying = [option for option in options if option.placement.offload == "none"]
        choices[name] = tuple(_offloaded_around(call, option, context) for option in staying)
        resident[name] = tuple(staying)
        if call.kind != "train_step":
            choices[name] += tuple(replace(option, least=option.most) for option in staying)
            resident[name] *= 2
    return _without_full_moves(plan_problem(context, choices), resident, context)


def keep_resident_where_free(question: Question, plan: ExecutionPlan) -> ExecutionPlan:
    """Keep each copy of weights on its devices for good, or all but its optimizer, where that costs no time.

    Where it must leave, let it come back beside the call before, if there is room.
    """
    least = question.seconds(plan)
    for calls in instances(question.graph, plan).values():
        for changed in _more_resident(plan, calls):
            if changed != plan and question.fits(changed) and (seconds := question.seconds(changed)) <= least:
                plan, least = changed, seconds
                break
    return plan


def _more_resident(plan: ExecutionPlan, calls: Sequence[Call]) -> Iterator[ExecutionPlan]:
    """Plans with more of what these calls share on its devices; the most first."""
    trained = any(call.kind == "train_step" for call in calls)
    for part in ("none", "optimizer") if trained else ("none",):
        yield with_changes(plan, calls, offload=part, prefetch=True)
    if not plan[calls[0].name].prefetch:
        yield with_changes(plan, calls, prefetch=True)


def _offloaded_around(call: Call, option: Candidate, context: CostContext) -> Candidate:
    """The option with its weights, or all that its training keeps, brought before the call and taken away after it.

    Gradients do not cross the host link: they come back as zeros.
    """
    strategy, sizes = option.placement.strategy, ModelSizes.of(context.graph.model(call.role or ""))
    trains = call.kind == "train_step"
    stages = [static_bytes(Execution(strategy), sizes, trains, stage) for stage in {0, strategy.pp - 1}]
    moved = max(stage.weights + stage.optimizer for stage in stages)
    one_way = context.site.sources.links((option.placement.mesh,)).seconds(moved, "host")
    return replace(_offloaded(option, option.most.peak), seconds=option.seconds + 2 * one_way)


def _offloaded(option: Candidate, peak: int) -> Candidate:
    """The option with nothing on its devices but while its call runs."""
    return replace(option, placement=replace(option.placement, offload="all"), least=MemoryBounds(0, peak))


def _without_full_moves(problem: PlanProblem, resident: Candidates, context: CostContext) -> PlanProblem:
    """The problem without moves of weights between overlapping meshes that cannot hold both copies of `resident`."""
    nodes = tuple(_forbid_full_moves(node, resident, context) for node in problem.problem.nodes)
    return replace(problem, problem=replace(problem.problem, nodes=nodes))


def _forbid_full_moves(node: ProblemNode, resident: Candidates, context: CostContext) -> ProblemNode:
    if not isinstance(node, PairNode) or node.microseconds.ndim == 2:
        return node
    trained, readers = resident[node.first], resident[node.second]
    call, backend = context.graph.call(node.first), context.site.backend
    model = context.graph.model(call.role or "")
    groups = np.array([call_overhead(call, option.placement, model, backend)[1] for option in trained])
    both = np.add.outer(_static_bytes(trained) + groups, _static_bytes(readers))
    largest = []  # of the devices of each reader's mesh: what it may fill
    for option in readers:
        mesh = option.placement.mesh
        nodes = range(mesh.first_node, mesh.first_node + mesh.num_nodes)
        memory = max(context.site.cluster.memory_bytes(number) for number in nodes)
        between = communicator_bytes(mesh.num_devices) if backend == "cuda" else 0  # for the move itself
        largest.append(usable_bytes(memory, backend) - between)
    full = both > np.array(largest)
    microseconds = node.microseconds.copy()
    microseconds[1][full] = FORBIDDEN
    microseconds[2][full & (microseconds[2] > 0)] = FORBIDDEN
    return replace(node, microseconds=microseconds)


def _static_bytes(options: Sequence[Candidate]) -> NDArray[np.int64]:
    return np.array([option.least.static for option in options], dtype=np.int64)
