"""Frozen weights that two roles hold once are counted once by the search too, so its bound stays true."""

from dataclasses import replace

import pytest

from prefect_rlhf.placement.cost.datasheets.hardware import Efficiency, Hardware
from prefect_rlhf.placement.cost.datasheets.kinds import DATASHEETS
from prefect_rlhf.placement.cost.sources import CostSources
from prefect_rlhf.placement.cost.workload import Workload
from prefect_rlhf.placement.devices.mesh import ClusterShape
from prefect_rlhf.placement.memory.certificate import certify_plan
from prefect_rlhf.placement.models.adapter import AdapterSpec
from prefect_rlhf.placement.plan import ExecutionPlan
from prefect_rlhf.placement.planner.best_plan import plan_graph
from prefect_rlhf.placement.planner.question import Question, Site
from prefect_rlhf.placement.planner.space.plan_problem import PlanSpace
from prefect_rlhf.placement.schedule.estimate import estimate
from tests.placement.layout.test_sharing import judged
from tests.support.strategies import GIB, SMOLLM2, on

WORK = Workload.fixed(128, 128)
LENT_GIB = 3.35  # a plan needs 3.25 with one base in both engines, and 3.47 with two
SOURCES = CostSources.equal_nodes(Hardware(DATASHEETS["h100"], 1, efficiency=Efficiency(call_seconds=0.05)), 1)
TIGHT = ClusterShape("tight", 1, 1, int(5.35 * GIB))
ONE = on("n0:0", "megatron")
PLACED = {
    "actor_generate": replace(on("n0:0", "vllm"), offload="all"),
    "ref_inference": ONE,
    "judge_inference": ONE,
    "actor_train_step": replace(ONE, micro_batches=8, recompute="all"),
}


@pytest.fixture(scope="module")
def graphs():
    """With a trunk that the reference and the judge hold once, and with a trunk each."""
    together = judged("scalar", SMOLLM2)
    return together, replace(together, models=tuple(replace(model, content="") for model in together.models))


def copies_in_common(graph):
    """Copies of weights that options of both frozen models name in the search."""
    calls = PlanSpace.of(Question(graph, Site(TIGHT, TIGHT.whole, SOURCES), WORK)).least.problem.calls
    of = {call.name: {option.copy for option in call.options} for call in calls}
    return of["ref_inference"] & of["judge_inference"]


def test_a_plan_that_fits_since_weights_are_held_once_is_not_below_the_bound(graphs):
    """Both frozen models stay on a device that has no room for another trunk."""
    together, apart = graphs
    assert copies_in_common(together) and not copies_in_common(apart)
    plan = ExecutionPlan("resident", TIGHT, tuple((call.name, PLACED[call.name]) for call in together))
    assert certify_plan(plan, together, WORK, "cuda").fits
    assert not certify_plan(plan, apart, WORK, "cuda").fits
    found = plan_graph(Question(together, Site(TIGHT, TIGHT.whole, SOURCES), WORK), budget_seconds=0.3)
    assert found.certificate.fits and not found.beats_bound
    assert estimate(together, plan, WORK, SOURCES).seconds >= found.lower_bound_seconds


LENT = {
    "actor_generate": on("n0:0", "vllm"),
    "ref_inference": ONE,
    "judge_inference": replace(ONE, offload="all"),
    "actor_train_step": replace(ONE, micro_batches=8, recompute="all"),
}


def test_a_plan_that_fits_since_vllm_lends_its_base_is_not_below_the_bound():
    """To a reference and to an actor with an adapter, on a device that has no room for a second base."""
    graph = judged("scalar", SMOLLM2)
    adapter, content = AdapterSpec(8, 16.0, ("q_proj", "v_proj")), "/models/base"
    changed = {"actor": {"adapter": adapter, "content": content}, "judge": {"content": ""}}
    graph = replace(graph, models=tuple(replace(model, **changed.get(model.role, {})) for model in graph.models))
    tight = ClusterShape("tight", 1, 1, int(LENT_GIB * GIB))
    question = Question(graph, Site(tight, tight.whole, SOURCES), WORK)
    plan = ExecutionPlan("resident", tight, tuple((call.name, LENT[call.name]) for call in graph))
    assert certify_plan(plan, graph, WORK, "cuda").fits
    stated = replace(LENT["actor_generate"], device_order=(0,))  # in another order of devices, it lends nothing
    elsewhere = replace(plan, placements=(("actor_generate", stated), *plan.placements[1:]))
    assert not certify_plan(elsewhere, graph, WORK, "cuda").fits
    problem = PlanSpace.of(question).least.problem
    copies = [{option.copy for option in call.options} for call in problem.calls if call.role in ("actor", "ref")]
    assert set.intersection(*copies), "options of vLLM and of Megatron name one copy"
    found = plan_graph(question, budget_seconds=0.3)
    assert found.certificate.fits and not found.beats_bound
    assert estimate(graph, plan, WORK, SOURCES).seconds >= found.lower_bound_seconds
