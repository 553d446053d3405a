"""A plan's time if a datasheet's constant is wrong, and the constant that it depends on most.

All changes are scheduled on the same augmented graph, so each takes a fraction of an estimate.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

from prefect_rlhf.placement.augmented.augment import augment
from prefect_rlhf.placement.cost.datasheets.correction import CONSTANTS, Correction
from prefect_rlhf.placement.cost.node import NodeCosts
from prefect_rlhf.placement.cost.sources import CostSources
from prefect_rlhf.placement.cost.workload import Workload
from prefect_rlhf.placement.graph import DataflowGraph
from prefect_rlhf.placement.plan import ExecutionPlan
from prefect_rlhf.placement.schedule.estimate import without_evaluation
from prefect_rlhf.placement.schedule.schedule import schedule

ITERATIONS = 7  # enough that the period repeats; a comparison needs no more
WORK_OF: Mapping[str, str] = {
    "compute": "matrix products",
    "memory": "reads and writes of device memory",
    "link": "messages within a node",
    "network": "messages between nodes",
    "host": "copies between device and host",
    "eager_launch": "launches of kernels without CUDA graphs",
    "graph_launch": "launches of kernels with CUDA graphs",
    "call": "the fixed part of a call",
}
"""In words, what each constant of a `Correction` stands for."""
TWICE = {name: Correction(**{name: 2.0}) for name in CONSTANTS}
FACTORS = (0.5, 0.7, 1.3, 2.0)
CHANGES = {(name, factor): Correction(**{name: factor}) for name in CONSTANTS for factor in FACTORS}
"""Each constant alone, by its factor. Under these changes an answer should stay close to the best plan."""


@dataclass(frozen=True, slots=True)
class Dependence:
    """How much longer a plan's iteration takes, as a share, if a constant's work takes twice as long.

    >>> print(Dependence("compute", 0.5))
    depends most on compute (matrix products): if that took twice as long, an iteration would take 50% longer
    """

    constant: str
    share: float

    def __str__(self) -> str:
        return (
            f"depends most on {self.constant} ({WORK_OF[self.constant]}): if that took twice as long, an iteration "
            f"would take {self.share:.0%} longer"
        )


def strongest_dependence(
    graph: DataflowGraph, plan: ExecutionPlan, workload: Workload, sources: CostSources
) -> Dependence | None:
    """Return the constant that a plan's time depends on most; None if all its times are measured."""
    now, *twice = changed_seconds(graph, plan, workload, sources, (Correction(), *TWICE.values()))
    shares = {name: seconds / now - 1 for name, seconds in zip(TWICE, twice, strict=True)}
    most = max(shares, key=shares.__getitem__)
    return Dependence(most, shares[most]) if shares[most] > 0 else None


def changed_seconds(
    graph: DataflowGraph,
    plan: ExecutionPlan,
    workload: Workload,
    sources: CostSources,
    changes: Iterable[Correction],
) -> tuple[float, ...]:
    """Return a legal plan's iteration time in seconds under each change of the constants."""
    trained, alone = without_evaluation(graph, plan)
    first = max((edge.lag for edge in trained.version_edges()), default=1)
    augmented = augment(trained, alone, first + ITERATIONS)

    def seconds(change: Correction) -> float:
        changed = replace(sources, nodes=tuple(map(change.on, sources.nodes)))
        costs = NodeCosts(trained, alone, workload, changed)
        return schedule(augmented, costs.seconds, costs.demand if sources.knows_contention else None).seconds_per_step

    return tuple(map(seconds, changes))
