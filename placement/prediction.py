"""What a run is expected to take: its own augmented graph, node by node, scheduled as its device locks will."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from prefect_rlhf.placement.augmented import AugmentedGraph
from prefect_rlhf.placement.cost.node import NodeCosts
from prefect_rlhf.placement.cost.sources import CostSources
from prefect_rlhf.placement.cost.workload import Workload
from prefect_rlhf.placement.schedule import Schedule, schedule


@dataclass(frozen=True, slots=True)
class Prediction:
    """`schedule` has every node, with what the controller adds to it.

    `worked_seconds` is what a node's ranks work, by its id, without what the controller adds (`orchestration_seconds`
    for each node). Nodes that no source of times knows are not in it; in the schedule they are orchestration alone.
    """

    schedule: Schedule
    worked_seconds: Mapping[str, float]
    orchestration_seconds: float = 0.0

    @property
    def seconds_per_step(self) -> float:
        """Of a step, once steps repeat."""
        return self.schedule.seconds_per_step


def predict(augmented: AugmentedGraph, workload: Workload, sources: CostSources) -> Prediction:
    """Of the very graph that runs. Raises InvalidInput where `sources` do not know its devices or models."""
    costs = NodeCosts(augmented.graph, augmented.plan, workload, sources)
    worked = {node.id: costs.worked_seconds(node) for node in augmented}
    known = {id: seconds for id, seconds in worked.items() if seconds is not None}
    return Prediction(schedule(augmented, costs.seconds), known, sources.orchestration_seconds)
