"""A plan's iteration time: its augmented graph, scheduled as a run's device locks would."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import lru_cache
from statistics import median

from prefect_rlhf.placement.augmented.augment import augment
from prefect_rlhf.placement.augmented.augmented_graph import AugmentedGraph
from prefect_rlhf.placement.augmented.node import Node, subject_of
from prefect_rlhf.placement.cost.contention import Demand
from prefect_rlhf.placement.cost.node import NodeCosts
from prefect_rlhf.placement.cost.sources import CostSources
from prefect_rlhf.placement.cost.workload import Workload
from prefect_rlhf.placement.graph import DataflowGraph
from prefect_rlhf.placement.plan import ExecutionPlan
from prefect_rlhf.placement.schedule.schedule import Schedule, schedule
from prefect_rlhf.placement.schedule.throughput import CallSpeed, IterationWork, call_speeds

ITERATIONS = 15  # scheduled in a row: the pipeline fills, a period is seen often enough, and the pipeline drains
COLD_ITERATIONS = 5


@dataclass(frozen=True, slots=True)
class Estimate:
    """A plan's schedule. Steps before `first_step` are different, because they bring no new weights."""

    plan: ExecutionPlan
    schedule: Schedule
    first_step: int

    @property
    def seconds(self) -> float:
        """A long run's iteration time in seconds, once all steps are equally far apart."""
        return self.schedule.seconds_per_step

    @property
    def cold_seconds(self) -> float:
        """Seconds until the first COLD_ITERATIONS iterations of a run have ended."""
        return max(self.schedule.step_ends()[:COLD_ITERATIONS])


def estimate(
    graph: DataflowGraph,
    plan: ExecutionPlan,
    workload: Workload,
    sources: CostSources,
    iterations: int = ITERATIONS,
) -> Estimate:
    """Time a legal plan of the graph; evaluation, which runs only every k steps, is left out."""
    trained, plan = without_evaluation(graph, plan)
    costs = NodeCosts(trained, plan, workload, sources)
    return estimate_with(trained, plan, costs.seconds, iterations, costs.demand if sources.knows_contention else None)


def estimate_with(
    graph: DataflowGraph,
    plan: ExecutionPlan,
    seconds: Callable[[Node], float],
    iterations: int = ITERATIONS,
    demand: Callable[[Node], Demand] | None = None,
) -> Estimate:
    """Time a plan from its nodes' `seconds`, without evaluation; with `demand`, they assume an otherwise idle host."""
    first = max((edge.lag for edge in graph.version_edges()), default=1)
    return Estimate(plan, schedule(augment(graph, plan, first + iterations), seconds, demand), first + 1)


def training(graph: DataflowGraph) -> DataflowGraph:
    """Return the graph without its evaluation calls."""
    return replace(graph, calls=tuple(call for call in graph if call.every is None))


def without_evaluation(graph: DataflowGraph, plan: ExecutionPlan) -> tuple[DataflowGraph, ExecutionPlan]:
    """Return graph and plan without evaluation calls."""
    trained = _trained(graph)
    names = {call.name for call in trained}
    return trained, replace(plan, placements=tuple(pair for pair in plan.placements if pair[0] in names))


@lru_cache(maxsize=64)  # every plan of a question asks for the same
def _trained(graph: DataflowGraph) -> DataflowGraph:
    return training(graph)


@dataclass(frozen=True, slots=True)
class Prediction:
    """A run's predicted schedule, and the times that it was made of."""

    schedule: Schedule
    """A run's nodes, or those of its first steps, with the controller's time added to each."""
    seconds_by_subject: Mapping[str, float]
    """The working time of a node's ranks in any step (see `subject_of`), without the controller's. If other work on
    their hosts slows them, it is the median over steps. Nodes without a source of times are not in it; in the schedule
    they take only orchestration."""
    orchestration_seconds: float = 0.0
    """The controller's time per node."""
    speeds: Mapping[str, CallSpeed] = field(default_factory=dict)
    """Those of a step's calls."""
    work: IterationWork | None = None
    """A step's work; None if only the end of a run is left."""

    def worked_seconds(self, node: str) -> float | None:
        """Return the seconds that a node's ranks work in any step, by node id; None if times have no source."""
        return self.seconds_by_subject.get(subject_of(node))

    @property
    def seconds_per_step(self) -> float:
        """Step time in seconds, once steps repeat."""
        return self.schedule.seconds_per_step


def predict(
    augmented: AugmentedGraph, workload: Workload, sources: CostSources, later: Iterable[Node] = ()
) -> Prediction:
    """Predict each node of the graph that runs, and `later` nodes if the graph has only the first steps.

    Raises InvalidInput for devices or models without times.
    """
    costs = NodeCosts(augmented.graph, augmented.plan, workload, sources)
    made = schedule(augmented, costs.seconds, costs.demand if sources.knows_contention else None)
    worked = {subject_of(node.id): costs.worked_seconds(node) for node in (*augmented, *later)}
    timed = {subject: seconds for subject, seconds in worked.items() if seconds is not None}
    if sources.knows_contention:
        slowed: dict[str, list[float]] = defaultdict(list)  # seconds by which other work on their hosts slows nodes
        for slot in made.slots:
            slowed[subject_of(slot.node.id)].append(slot.seconds - costs.seconds(slot.node))
        timed = {subject: seconds + median(slowed.get(subject, [0.0])) for subject, seconds in timed.items()}
    graph = augmented.graph
    speeds = call_speeds(graph, augmented.plan, made, workload, sources)
    work = IterationWork.of(graph, workload) if made.step_ends() else None
    return Prediction(made, timed, sources.orchestration_seconds, speeds, work)
