"""Models that fit only one at a time take turns: such plans are found, and no plan beats their bound."""

from dataclasses import replace
from functools import cache

import pytest
from hypothesis import HealthCheck, given, settings

from prefect_rlhf.errors.errors import PlanDoesNotFit
from prefect_rlhf.placement.cost.datasheets.hardware import Hardware
from prefect_rlhf.placement.cost.datasheets.kinds import DATASHEETS
from prefect_rlhf.placement.cost.sources import CostSources
from prefect_rlhf.placement.cost.workload import Workload
from prefect_rlhf.placement.planner.best_plan import plan_graph
from prefect_rlhf.placement.planner.planned import Planned
from prefect_rlhf.placement.planner.question import Question, Site
from prefect_rlhf.placement.planner.space.plan_problem import FORBIDDEN, PlanSpace
from prefect_rlhf.placement.planner.time_sharing import time_sharing_problem
from prefect_rlhf.placement.schedule.estimate import estimate
from prefect_rlhf.placement.search.driver import search
from prefect_rlhf.placement.search.problem import PairNode
from tests.support.cases import examples
from tests.support.strategies import GIB, SMOLLM2, TWO_DEVICES, model, plans, ppo

WORKLOAD = Workload.fixed(128, 128)
SOURCES = CostSources.equal_nodes(Hardware(DATASHEETS["h100"], 2), 1)
GRAPH = replace(ppo(), models=tuple(model(one.role, one.head, SMOLLM2) for one in ppo().models))
TIGHT = replace(TWO_DEVICES, device_memory_bytes=GIB * 7 // 4)  # one optimizer of the two, and little else


def question(cluster) -> Question:
    return Question(GRAPH, Site(cluster, cluster.whole, SOURCES, "cpu"), WORKLOAD)


@cache
def tight() -> Planned:
    return plan_graph(question(TIGHT), budget_seconds=1.0)


@pytest.mark.all
def test_a_plan_is_found_that_offloads_trained_models():
    planned = tight()
    assert planned.certificate.fits
    trained = [planned.plan[call.name] for call in GRAPH if call.kind == "train_step"]
    assert "all" in {placement.offload for placement in trained}


def test_hosts_without_room_for_what_leaves_the_devices_are_named_in_the_refusal():
    """The devices are large enough: more of their memory is not what is missing."""
    with pytest.raises(PlanDoesNotFit, match=r"memory of the host of n0: got .*; hosts with more memory"):
        plan_graph(question(replace(TIGHT, host_memory_bytes=GIB // 2)), evaluations=20_000)


def test_with_enough_memory_no_trained_model_leaves():
    planned = plan_graph(question(TWO_DEVICES), budget_seconds=0.5)
    assert {planned.plan[call.name].offload for call in GRAPH if call.role in ("actor", "critic")} == {"none"}
    assert planned.seconds < tight().seconds


@cache
def bound_seconds() -> float:
    """With room for everything, so that no plan is left out for its memory."""
    problem = PlanSpace.of(question(replace(TWO_DEVICES, device_memory_bytes=80 * GIB))).least.problem
    return search(problem, 1.0).lower_bound_seconds


@given(drawn=plans(GRAPH, TWO_DEVICES))
@settings(max_examples=examples(30), deadline=None, suppress_health_check=[HealthCheck.too_slow])
def test_no_drawn_plan_takes_less_than_the_bound(drawn):
    """Whatever of it is offloaded."""
    assert estimate(GRAPH, drawn, WORKLOAD, SOURCES).seconds >= bound_seconds() * (1 - 1e-9)


@pytest.mark.parametrize("pose", [time_sharing_problem, lambda space: space.least])
def test_a_copy_is_forbidden_only_where_both_do_not_fit(pose):
    """On overlapping meshes; on others, and where the copy is the trained one itself, never."""
    for cluster, some in ((TIGHT, True), (replace(TIGHT, device_memory_bytes=80 * GIB), False)):
        nodes = pose(PlanSpace.of(question(cluster))).problem.nodes
        moves = [node.microseconds for node in nodes if isinstance(node, PairNode) and node.microseconds.ndim == 3]
        assert len(moves) == 2
        assert any((move == FORBIDDEN).any() for move in moves) is some
        assert not any((move[0] == FORBIDDEN).any() for move in moves)


@pytest.mark.parametrize("role", ["actor", "critic"])
def test_staying_models_fit_the_certificate(role):
    """Nothing more could stay: the other way round the plan would not fit, or take longer."""
    planned, asked = tight(), question(TIGHT)
    names = [call.name for call in GRAPH if call.role == role]
    staying = replace(
        planned.plan,
        placements=tuple((n, replace(p, offload="none") if n in names else p) for n, p in planned.plan.placements),
    )
    assert staying == planned.plan or not asked.fits(staying) or asked.seconds(staying) >= planned.seconds
