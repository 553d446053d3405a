"""A run on one rank in this process, without Prefect: what it prepares, places and computes is a run's."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from prefect_rlhf.engines.gang.in_process import InProcessGang
from prefect_rlhf.engines.rank.rank import Rank
from prefect_rlhf.flows.algorithm.rlhf_flow import AlgorithmFlow
from prefect_rlhf.placement.augmented.augment import augment
from prefect_rlhf.placement.devices.mesh import ClusterShape
from prefect_rlhf.placement.plan import trained_instance
from prefect_rlhf.tasks.running.dispatch import Dispatcher
from tests.support.runs import prepared, whole

ONE = whole(ClusterShape("one", num_nodes=1, devices_per_node=1, device_memory_bytes=8 << 30))


@dataclass(frozen=True)
class Trained:
    """What training left: the metrics of each train_step, and the final weights."""

    steps: list[Mapping[str, float]]
    weights: Mapping[str, Tensor]


def train_on_one_rank(flow: AlgorithmFlow, given: Mapping[str, Any], folder: Path, role: str = "actor") -> Trained:
    """Run all steps of a flow that trains a role, without its evaluations and exports."""
    asked = prepared(flow, given, ONE)
    run = asked.request.training_run(asked.chosen.plan, folder)
    graph, ranks, steps = augment(run.graph, run.plan, run.num_steps), [], []

    def rank(number: int, size: int) -> Rank:
        ranks.append(Rank(number, size))
        return ranks[0]

    with closing(InProcessGang(rank, num_threads=1)) as gang:
        dispatcher = Dispatcher(run, gang)
        dispatcher.build(lambda instance, outcome: None)
        for step in range(1, run.num_steps + 1):
            for node in graph.of_step(step):
                if node.kind == "export" or (node.call is not None and node.call.every is not None):
                    continue
                outcome = dispatcher.execute(node)
                if node.kind == "train_step":
                    steps.append(outcome.metrics)
            dispatcher.finish_step(step, oldest=step + 1)
        engine = ranks[0].models[trained_instance(run.graph, run.plan, role)].engine
        return Trained(steps, {name: shard.view.clone() for name, shard in engine.weights().items()})
