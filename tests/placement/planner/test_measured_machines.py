"""`auto` on two real machines: from the speeds of their probes it chooses a plan that was the best by measured steps.

`data/measured_machines.json` has, of each machine, the speeds, the measured seconds of nodes, and those of whole steps
under some plans (`benchmarks.planner.demo_step` prints all of them). A plan costs what its nodes took: seconds by call,
engine, strategy and micro-batches, in the schedule of its graph. A call that was measured with dp 2 and not on a single
device takes as many times longer there as the estimate says. Any other node that was not measured fails the test: then
it has to be measured.
"""

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from prefect_rlhf.flows.dpo import dpo
from prefect_rlhf.flows.forms.options import RunOptions
from prefect_rlhf.flows.grpo import grpo
from prefect_rlhf.flows.hardware.node_hardware import node_hardware
from prefect_rlhf.flows.ppo import ppo
from prefect_rlhf.placement.augmented.node import Node
from prefect_rlhf.placement.augmented.work import ModelCall, Reallocate
from prefect_rlhf.placement.cost.node import NodeCosts
from prefect_rlhf.placement.cost.sizes import ModelSizes
from prefect_rlhf.placement.cost.sources import CostSources
from prefect_rlhf.placement.cost.speeds import Speeds
from prefect_rlhf.placement.cost.uneven import placed_cost
from prefect_rlhf.placement.cost.workload import CallWork, Workload
from prefect_rlhf.placement.devices.strategy import Strategy
from prefect_rlhf.placement.graph import Call, DataflowGraph
from prefect_rlhf.placement.plan import ExecutionPlan, Placement
from prefect_rlhf.placement.planner.best_plan import plan_graph
from prefect_rlhf.placement.planner.preset_plan import preset
from prefect_rlhf.placement.planner.question import Question, Site
from prefect_rlhf.placement.plans.plan_file import read_plan
from prefect_rlhf.placement.schedule.estimate import estimate_with, without_evaluation
from prefect_rlhf.tasks.rl.settings.online import GRPO
from tests.flows.test_algorithms import traced
from tests.support.plan_matrix import plan
from tests.support.runs import plan_file
from tests.support.strategies import SMOLLM2, TWO_DEVICES

MACHINES: Mapping[str, Any] = json.loads((Path(__file__).parents[1] / "data" / "measured_machines.json").read_text())
PROMPT, RESPONSE = 6, 24  # tokens of the demo's rows
NEARLY_BEST = 1.03
BUDGET_SECONDS = 2.0
ORCHESTRATION = 0.06  # seconds of processor time of a task run, when these machines were measured


def question(machine: Mapping[str, Any], graph: DataflowGraph | None = None) -> Question:
    """The demo's PPO, or another algorithm with its models, on two ranks with the probed speeds."""
    graph = graph or traced(ppo)
    graph = replace(graph, models=tuple(replace(each, shape=SMOLLM2, dtype="bfloat16") for each in graph.models))
    node = Speeds(**machine["speeds"]).on(node_hardware("cpu", 2, None))
    sources = CostSources((node,), (), ORCHESTRATION)
    return Question(graph, Site(TWO_DEVICES, TWO_DEVICES.whole, sources, "cpu"), Workload.fixed(PROMPT, RESPONSE))


@dataclass(frozen=True)
class Price:
    """The price of plans: seconds of a step from the measured seconds of its nodes."""

    asked: Question
    measured: Mapping[str, float]

    def of(self, whole: ExecutionPlan) -> float:
        """KeyError for a plan with a node that has no price."""
        graph, plan = without_evaluation(self.asked.graph, whole)
        costs = NodeCosts(graph, plan, self.asked.workload, self.asked.site.sources)

        def seconds(node: Node) -> float:
            if isinstance(node.work, ModelCall):
                return self._call_seconds(node.work.call, plan[node.work.call.name], costs.cost(node).worked)
            if isinstance(node.work, Reallocate):
                return self.measured[f"reallocate to {node.work.target.engine}"]
            return ORCHESTRATION

        return estimate_with(graph, plan, seconds).seconds

    def _call_seconds(self, call: Call, placed: Placement, estimated: float) -> float:
        cuts = f" x{placed.micro_batches}" if placed.micro_batches > 1 else ""
        name = f"{call.name} {placed.engine}"
        if (key := f"{name} {placed.strategy}{cuts}") in self.measured or placed.strategy != Strategy():
            return self.measured[key]
        half = replace(placed, mesh=TWO_DEVICES.whole, strategy=Strategy(dp=2))
        work, sizes = CallWork.of(call, self.asked.workload), ModelSizes.of(self.asked.graph.model(call.role))
        return self.measured[f"{name} dp2"] * estimated / placed_cost(work, sizes, half, self.asked.site.sources).worked


def measured_plans(machine: Mapping[str, Any], folder: Path) -> Iterator[tuple[ExecutionPlan, float]]:
    """The plans that ran as a whole, with the seconds of their steps."""
    for number, measured in enumerate(machine["plans"]):
        file = plan_file(plan(*measured["plan"]), folder / f"{number}.json")
        yield read_plan(file, TWO_DEVICES), measured["step_seconds"]


@pytest.fixture(params=MACHINES)
def machine(request):
    return MACHINES[request.param]


def test_node_times_add_up_to_measured_step_times(machine, tmp_path):
    """So that the price of a plan that did not run as a whole is worth something."""
    asked = question(machine)
    price = Price(asked, machine["node_seconds"])
    for each, step_seconds in measured_plans(machine, tmp_path):
        assert price.of(each) == pytest.approx(step_seconds, rel=0.06)


def test_auto_chooses_a_plan_that_is_the_best_by_measured_seconds(machine, tmp_path):
    asked = question(machine)
    price, chosen = Price(asked, machine["node_seconds"]), plan_graph(asked, BUDGET_SECONDS).plan
    best = min(price.of(each) for each, _ in measured_plans(machine, tmp_path))
    assert price.of(chosen) <= NEARLY_BEST * best


def test_the_estimate_of_measured_plans_is_near_their_steps(machine, tmp_path):
    asked = question(machine)
    for each, step_seconds in measured_plans(machine, tmp_path):
        assert asked.seconds(each) == pytest.approx(step_seconds, rel=0.25)


@pytest.mark.parametrize("graph", [traced(grpo, algo=GRPO(batch_size=8, samples_per_prompt=4)), traced(dpo)])
def test_deployments_without_a_plan_lose_little(machine, graph):
    """Their default plan has every call on all devices; docs/plans.md states the reasons."""
    asked = question(machine, graph)
    default = preset(RunOptions().plan, asked.graph, TWO_DEVICES, TWO_DEVICES.whole, PROMPT + RESPONSE, "cpu")
    assert asked.seconds(default) <= 1.05 * plan_graph(asked, BUDGET_SECONDS).seconds
