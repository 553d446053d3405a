"""A model keeps a call and another's visit apart only if it can come between the two; the bound says when none can."""

import math
from dataclasses import replace

import pytest

from prefect_rlhf.placement.augmented.augment import augment
from prefect_rlhf.placement.devices.mesh import ClusterShape
from prefect_rlhf.placement.memory.windows import Precedence, windows
from prefect_rlhf.placement.planner.space.plan_problem import PlanSpace
from prefect_rlhf.placement.planner.space.visits import visits_after, visits_between
from tests.placement.planner.test_planner import GRAPHS, question
from tests.support.strategies import GIB, on

TWO = ClusterShape("two", 1, 2, 60 * GIB)


def placed(graph, offloaded):
    """Every call with a model on both devices, with its copy offloaded whole or not at all, as prefetched."""
    calls = [call for call in graph if call.kind != "compute" and call.every is None]
    plain = {call.name: on("n0:0-1", "megatron", dp=2) for call in calls}
    roles = {graph.call(name).role for name in offloaded}
    return {
        call.name: replace(plain[call.name], offload="all") if call.role in roles else plain[call.name]
        for call in calls
    }


@pytest.mark.parametrize("between", ["reward_inference", "ref_inference"])
def test_no_model_that_both_wait_for_keeps_a_train_step_from_the_visit_of_another(between):
    """In the augmented graph the critic's train_step then runs beside the actor's window, whatever else leaves."""
    graph = GRAPHS["ppo"]
    asked = question(graph, TWO)
    plan = asked.plan("visits", placed(graph, ["actor_train_step", between]))
    augmented = augment(graph, plan, 3)
    order, node = Precedence(augmented), [each.id for each in augmented.nodes].index("critic_train_step@2")
    of_actor = [each for each in windows(augmented) if each.instance.role == "actor" and each.part == "optimizer"]
    assert any(order.may_be_open(window, node) for window in of_actor)
    known = PlanSpace.of(asked).least.problem.between["critic_train_step", "actor_train_step"]
    assert between not in known and "critic_train_step" in known


def test_a_reader_of_new_weights_may_keep_them_apart():
    """A train_step that lets the weights pass waits for the move to the reader, which may visit for that."""
    known = PlanSpace.of(question(GRAPHS["ppo"], TWO)).least.problem.between["critic_train_step", "actor_train_step"]
    assert "actor_generate" in known


def test_with_older_weights_any_may():
    graph = replace(GRAPHS["ppo"], staleness=1)
    assert visits_between(graph, [call.name for call in graph if call.kind != "compute"], []) == {}


@pytest.mark.parametrize("apart", [False, True], ids=["together", "apart"])
@pytest.mark.parametrize("staleness", [0, 1])
@pytest.mark.parametrize("name", ["ppo", "remax", "dpo", "critic first"])
def test_visits_to_common_devices_lie_in_the_stated_order(name, staleness, apart):
    """Each window with the first call of a pair ends before the window with the second begins, whatever runs when.

    A critic's train_step that lets the actor's weights pass is on another device than the generation.
    """
    graph = replace(GRAPHS[name], staleness=staleness)
    asked = question(graph, TWO)
    chosen = placed(graph, [call.name for call in graph if call.kind != "compute" and call.every is None])
    if apart:
        others = [call for call in chosen if call != "actor_train_step"]
        alone = {call: on("n0:0" if call == "actor_generate" else "n0:1", "megatron") for call in others}
        chosen |= {call: replace(each, offload=chosen[call].offload) for call, each in alone.items()}
    augmented = augment(graph, asked.plan("visits", chosen), 5)
    order, place = Precedence(augmented), {node.id: index for index, node in enumerate(augmented.nodes)}

    def window(call, step):
        part = "optimizer" if graph.call(call).kind == "train_step" else None
        own = [each for each in windows(augmented) if each.instance.role == graph.call(call).role]
        around = [each for each in own if each.opened < place[f"{call}@{step}"] < (each.closed or math.inf)]
        return next(each for each in around if part is None or each.part == part)

    problem = PlanSpace.of(asked).least.problem
    edges = [edge for edge in problem.edges if edge.source in chosen and edge.target in chosen]
    known = visits_after(graph, list(chosen), edges, [])
    others = [
        (first, second)
        for first, second in known
        if graph.call(first).role != graph.call(second).role and chosen[first].mesh.overlaps(chosen[second].mesh)
    ]
    assert others
    for first, second in others:
        one, other = window(first, 3 - known[first, second]), window(second, 3)
        assert one.closed is not None and order.precedes(one.closed, other.opened), (first, second)
