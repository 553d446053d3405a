"""What the planner counts as certain before a call is in every plan's augmented graph; and the controller's share of
each node does not lift the bound above any plan."""

from dataclasses import replace
from functools import cache

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from prefect_rlhf.placement.augmented.augment import augment
from prefect_rlhf.placement.devices.mesh import ClusterShape
from prefect_rlhf.placement.planner.best_plan import plan_graph
from prefect_rlhf.placement.planner.planned import Planned
from prefect_rlhf.placement.planner.question import Question
from prefect_rlhf.placement.planner.space.candidates import CostContext, candidate
from prefect_rlhf.placement.planner.space.feed_nodes import surely_fed
from tests.placement.planner.test_planner import GRAPHS, SOURCES, question
from tests.support.cases import examples, first
from tests.support.strategies import GIB, plans

FOUR_DEVICES = ClusterShape("four", 1, 4, 8 * GIB)
SLOW_CONTROLLER = replace(SOURCES, orchestration_seconds=0.1)
NAMES = ("ppo", "ppo one step off", "remax", "dpo")


def asked(name: str) -> Question:
    return question(GRAPHS[name], FOUR_DEVICES, sources=SLOW_CONTROLLER)


@cache
def planned(name: str) -> Planned:
    return plan_graph(asked(name), budget_seconds=0.5)


@pytest.mark.parametrize("name", first(1, NAMES))
@given(data=st.data())
@settings(max_examples=examples(25), deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_a_call_that_is_surely_fed_has_a_transfer_to_all_its_devices(name, data):
    graph = GRAPHS[name]
    drawn = data.draw(plans(graph, FOUR_DEVICES))
    context, nodes = CostContext.of(asked(name)), augment(graph, drawn, 1).nodes
    for call in (call for call in context.graph if call.kind != "compute"):
        if surely_fed(call, candidate(call, drawn[call.name], context), context.graph):
            fed = [node for node in nodes if node.kind == "transfer" and node.call == call]
            assert fed and all(node.devices.issuperset(drawn[call.name].mesh.devices()) for node in fed)


def test_a_multi_device_train_step_surely_gets_computed_rows():
    context = CostContext.of(asked("ppo"))
    train = next(call for call in context.graph if call.kind == "train_step")
    options = planned("ppo").space.candidates[train.name]
    fed = {option.placement.mesh.num_devices for option in options if surely_fed(train, option, context.graph)}
    assert fed == {2, 4}


@pytest.mark.parametrize("name", first(1, NAMES))
@given(data=st.data())
@settings(max_examples=examples(25), deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_no_plan_of_a_slow_controller_takes_less_than_the_bound(name, data):
    drawn = data.draw(plans(GRAPHS[name], FOUR_DEVICES))
    assert asked(name).seconds(drawn) >= planned(name).lower_bound_seconds * (1 - 1e-9)
