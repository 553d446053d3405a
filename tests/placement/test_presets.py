"""Presets give every graph a legal plan, or say why there is none."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from prefect_rlhf.placement.check import check_plan
from prefect_rlhf.placement.errors import InvalidInput, PlanDoesNotFit
from prefect_rlhf.placement.mesh import ClusterShape, DeviceMesh
from prefect_rlhf.placement.presets import PRESETS, preset
from prefect_rlhf.placement.strategy import Strategy
from tests.strategies import GIB, TWO_DEVICES, dpo, graphs, meshes, ppo, remax

CLUSTER = ClusterShape("desk", 2, 4, 8 * GIB)
WHOLE = TWO_DEVICES.whole


@given(st.sampled_from(sorted(PRESETS)), graphs(), meshes(CLUSTER))
def test_a_preset_gives_a_plan_that_passes_every_check_or_refuses(name, graph, mesh):
    try:
        plan = preset(name, graph, CLUSTER, mesh)
    except InvalidInput as error:
        assert mesh.name in str(error)
    else:
        assert check_plan(plan, graph, mesh) is plan


@pytest.mark.parametrize("graph", [ppo(), remax(), dpo()], ids=lambda graph: graph.name)
def test_flattening_puts_every_model_on_the_whole_mesh_in_replicas(graph):
    plan = preset("flattening", graph, TWO_DEVICES, WHOLE)
    placed = {call.name: plan[call.name] for call in graph if call.kind != "compute"}
    assert {(p.mesh, p.strategy) for p in placed.values()} == {(WHOLE, Strategy(dp=2))}
    assert not any(p.offload != "none" for p in placed.values())


def test_side_by_side_lets_reference_and_reward_run_at_the_same_time():
    plan = preset("side_by_side", ppo(), TWO_DEVICES, WHOLE)
    meshes = {name: placement.mesh.name for name, placement in plan.placements}
    assert meshes == {
        "actor_generate": "n0:0-1",
        "ref_inference": "n0:0",
        "reward_inference": "n0:1",
        "critic_inference": "n0:1",
        "advantages": "n0:0",
        "actor_train_step": "n0:0-1",
        "critic_train_step": "n0:0-1",
    }


def test_split_lets_actor_and_critic_train_at_the_same_time():
    plan = preset("split", ppo(), TWO_DEVICES, WHOLE)
    meshes = {name: placement.mesh.name for name, placement in plan.placements}
    assert meshes == {
        "actor_generate": "n0:0-1",
        "ref_inference": "n0:0",
        "reward_inference": "n0:1",
        "critic_inference": "n0:1",
        "advantages": "n0:0",
        "actor_train_step": "n0:0",
        "critic_train_step": "n0:1",
    }


def test_separation_trains_on_one_half_what_the_other_half_predicts_with():
    plan = preset("separation", ppo(), TWO_DEVICES, WHOLE)
    halves = {each.name: plan[each.name].mesh.name for each in ppo()}
    training = ("advantages", "actor_train_step", "critic_train_step")
    assert {name for name, mesh in halves.items() if mesh == "n0:1"} == set(training)
    assert {mesh for name, mesh in halves.items() if name not in training} == {"n0:0"}


@pytest.mark.parametrize("name", ["side_by_side", "split", "separation"])
def test_presets_of_two_halves_need_two_halves(name):
    with pytest.raises(InvalidInput, match="mesh: got 'n0:0', expected a mesh of two equal halves"):
        preset(name, ppo(), TWO_DEVICES, DeviceMesh(0, 1, 0, 1))


def test_rows_that_do_not_divide_over_replicas_ask_for_tp():
    """Six pairs on four devices: two replicas of three pairs, each split over two devices."""
    graph = replace(dpo(), calls=tuple(replace(call, num_rows=12) for call in dpo()))
    plan = preset("flattening", graph, CLUSTER, DeviceMesh(0, 1, 0, 4))
    assert plan["actor_train_step"].strategy == Strategy(dp=2, tp=2)


def test_an_unknown_preset_is_refused_with_the_names_that_exist():
    names = ", ".join(PRESETS)
    with pytest.raises(InvalidInput, match=f"got 'flat', expected a plan file or one of the presets {names}"):
        preset("flat", ppo(), TWO_DEVICES, WHOLE)


def test_frozen_roles_are_offloaded_where_memory_is_short():
    """There is a size of device that holds two replicas of everything only while the frozen roles come and go."""
    fitting = {}
    for quarters in range(126, 150):
        cluster = ClusterShape("small", 1, 2, quarters << 18)
        plan = preset("flattening", ppo(), cluster, cluster.whole, max_sequence_length=64)
        off = sum(placement.offload != "none" for _, placement in plan.placements)
        fitting.setdefault((plan["actor_train_step"].strategy.dp, off), quarters)
    assert fitting[2, 2] < fitting[2, 0]


def test_a_plan_that_cannot_fit_is_refused_with_what_fills_the_memory():
    tiny = ClusterShape("tiny", 1, 2, 1 << 20)
    with pytest.raises(PlanDoesNotFit, match=r"memory of n0:0: got .* MiB at ") as error:
        preset("flattening", ppo(), tiny, tiny.whole)
    assert "actor.megatron n0:0-1 dp2: optimizer" in error.value.report
