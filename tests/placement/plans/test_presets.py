"""Presets give every graph a legal plan, or say why there is none."""

import re
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from prefect_rlhf.errors.errors import InvalidInput, PlanDoesNotFit
from prefect_rlhf.placement.devices.mesh import ClusterShape, DeviceMesh
from prefect_rlhf.placement.devices.strategy import Strategy
from prefect_rlhf.placement.planner.preset_plan import preset
from prefect_rlhf.placement.plans.check import check_plan
from prefect_rlhf.placement.plans.presets import ALIASES, PRESETS, preset_named
from tests.support.strategies import GIB, TWO_DEVICES, dpo, graphs, meshes, ppo, remax

pytestmark = pytest.mark.quick

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


@pytest.mark.parametrize(("name", "actor", "critic"), [("side_by_side", "n0:0-1", "n0:0-1"), ("split", "n0:0", "n0:1")])
def test_reference_and_reward_run_at_the_same_time_and_under_split_both_train_steps(name, actor, critic):
    plan = preset(name, ppo(), TWO_DEVICES, WHOLE)
    assert {name: placement.mesh.name for name, placement in plan.placements} == {
        "actor_generate": "n0:0-1",
        "ref_inference": "n0:0",
        "reward_inference": "n0:1",
        "critic_inference": "n0:1",
        "advantages": "n0:0",
        "actor_train_step": actor,
        "critic_train_step": critic,
    }


def test_separation_trains_on_half_and_infers_on_the_other():
    plan = preset("separation", ppo(), TWO_DEVICES, WHOLE)
    halves = {each.name: plan[each.name].mesh.name for each in ppo()}
    training = ("advantages", "actor_train_step", "critic_train_step")
    assert {name for name, mesh in halves.items() if mesh == "n0:1"} == set(training)
    assert {mesh for name, mesh in halves.items() if name not in training} == {"n0:0"}


def test_streamed_separation_gives_generation_inference_and_training_devices_of_their_own():
    """Generation and inference are in four parts, or as many as eight rows in groups of four have."""
    four = ClusterShape("four", 1, 4, 8 * GIB)
    plan = preset("separation-streamed", ppo(), four, four.whole)
    placed = {each.name: (plan[each.name].mesh.name, plan[each.name].parts) for each in ppo()}
    assert placed == {
        "actor_generate": ("n0:0", 4),
        "ref_inference": ("n0:1", 4),
        "reward_inference": ("n0:1", 4),
        "critic_inference": ("n0:1", 4),
        "advantages": ("n0:2", 1),
        "actor_train_step": ("n0:2-3", 1),
        "critic_train_step": ("n0:2-3", 1),
    }
    groups = replace(ppo(), calls=tuple(replace(each, rows_per_item=4) for each in ppo()))
    assert preset("separation-streamed", groups, four, four.whole)["actor_generate"].parts == 2


NODES = ClusterShape("nodes", 8, 8, 80 * GIB)
ELSEWHERE = {"advantages"}
"""Computations: where they run is not a preset's point."""


def where(name, graph=None, cluster=NODES):
    """Which mesh each call with a model has."""
    graph = graph or ppo()
    rule = preset_named(name)
    return {each.name: rule.mesh(each, cluster.whole, graph).name for each in graph if each.name not in ELSEWHERE}


def test_interleaving_keeps_the_critic_on_all_devices():
    """What differs from side_by_side: only frozen models take turns with each other."""
    meshes = where("interleaving")
    assert meshes.pop("ref_inference") == "n0-3:0-7"
    assert meshes.pop("reward_inference") == "n4-7:0-7"
    assert set(meshes.values()) == {"n0-7:0-7"}


def test_hybridflow_split_generates_where_the_actor_is():
    meshes = where("hybridflow-split")
    assert {name for name, mesh in meshes.items() if mesh == "n4-7:0-7"} == {
        "reward_inference",
        "critic_inference",
        "critic_train_step",
    }
    assert meshes["actor_generate"] == meshes["actor_train_step"] == meshes["ref_inference"] == "n0-3:0-7"


def test_standalone_gives_shares_as_hybridflow_does():
    """Section 8.3: of 128 devices 64 for the actor, 32 for the critic, 16 each for the others; here of 64."""
    meshes = where("standalone")
    assert {meshes["actor_generate"], meshes["actor_train_step"]} == {"n0-3:0-7"}
    assert {meshes["critic_inference"], meshes["critic_train_step"]} == {"n4-5:0-7"}
    assert (meshes["ref_inference"], meshes["reward_inference"]) == ("n6:0-7", "n7:0-7")


def test_standalone_divides_a_single_node():
    node = ClusterShape("node", 1, 8, 80 * GIB)
    assert set(where("standalone", cluster=node).values()) == {"n0:0-3", "n0:4-5", "n0:6", "n0:7"}


def test_reals_heuristic_uses_the_same_strategy_for_all_calls():
    """Tensor parallelism over a node, data parallelism across nodes, generation with the weights that are trained."""
    cluster = ClusterShape("pairs", 2, 2, 8 * GIB)
    plan = preset("real-heuristic", remax(), cluster, cluster.whole)
    placed = [plan[each.name] for each in remax() if each.kind != "compute"]
    assert {(one.mesh, one.strategy, one.engine) for one in placed} == {(cluster.whole, Strategy(2, 2), "megatron")}


def test_a_ratio_says_how_much_the_first_part_is():
    assert where("separation:0.25")["actor_generate"] == "n0-1:0-7"
    assert where("separation:0.25")["actor_train_step"] == "n2-7:0-7"
    assert where("separation")["actor_generate"] == "n0-3:0-7"


@pytest.mark.parametrize(
    ("name", "right"),
    [
        ("separation:1.5", "a share of the devices, between 0 and 1, for generation and inference"),
        ("flattening:0.5", "flattening: it has no ratio"),
        ("separation:", "a number after separation:, the share of the devices"),
        ("separation:half", "a number after separation:"),
    ],
)
def test_a_ratio_without_effect_is_refused(name, right):
    with pytest.raises(InvalidInput, match=right):
        preset_named(name)


def test_a_ratio_within_a_node_is_refused():
    with pytest.raises(InvalidInput, match="expected several nodes to give 0.25 of them"):
        preset("separation:0.25", ppo(), TWO_DEVICES, WHOLE)


@pytest.mark.parametrize("name", ALIASES)
def test_other_names_mean_the_same(name):
    assert preset_named(name) is PRESETS[ALIASES[name]]


@pytest.mark.parametrize("name", sorted(PRESETS.keys() - {"flattening", "real-heuristic"}))
def test_presets_of_two_halves_need_two_halves(name):
    with pytest.raises(InvalidInput, match="mesh: got 'n0:0', expected a mesh of two equal halves"):
        preset(name, ppo(), TWO_DEVICES, DeviceMesh(0, 1, 0, 1))


@pytest.mark.parametrize(("pairs", "strategy"), [(6, Strategy(dp=4)), (3, Strategy(dp=2, tp=2)), (1, Strategy(tp=4))])
def test_rows_need_not_divide_over_replicas_but_each_gets_some(pairs, strategy):
    """Six pairs on four devices: replicas of 2, 2, 1 and 1. Three: two replicas, each split over two devices."""
    graph = replace(dpo(), calls=tuple(replace(call, num_rows=2 * pairs) for call in dpo()))
    models = tuple(replace(m, shape=replace(m.shape, num_kv_heads=4)) for m in graph.models)
    plan = preset("flattening", replace(graph, models=models), CLUSTER, DeviceMesh(0, 1, 0, 4))
    assert plan["actor_train_step"].strategy == strategy


def test_replicas_may_be_idle_if_no_other_strategy_is_valid():
    """Three heads split over no two devices, one layer makes no pipeline: four replicas for the three pairs."""
    graph = replace(dpo(), calls=tuple(replace(call, num_rows=6) for call in dpo()))
    odd = {"num_attention_heads": 3, "num_kv_heads": 3, "num_layers": 1}
    models = tuple(replace(m, shape=replace(m.shape, **odd)) for m in graph.models)
    plan = preset("flattening", replace(graph, models=models), CLUSTER, DeviceMesh(0, 1, 0, 4))
    assert plan["actor_train_step"].strategy == Strategy(dp=4)


def test_an_unknown_preset_is_refused_with_the_names_that_exist():
    said = f"got 'flat', expected auto, measure(k), a plan file, or a preset ({', '.join(PRESETS)})"
    with pytest.raises(InvalidInput, match=re.escape(said)):
        preset("flat", ppo(), TWO_DEVICES, WHOLE)


def test_an_impossible_preset_lists_possible_presets():
    """Three models need three devices to be alone on; there are two."""
    with pytest.raises(InvalidInput, match="; standalone has no plan on n0:0-1, auto and flattening may have$"):
        preset("standalone", ppo(), TWO_DEVICES, WHOLE)


def test_frozen_roles_are_offloaded_where_memory_is_short():
    """There is a size of device that holds two replicas of everything only while the frozen roles come and go."""
    fitting = {}
    for quarters in range(100, 150):
        cluster = ClusterShape("small", 1, 2, quarters << 18)
        plan = preset("flattening", ppo(), cluster, cluster.whole, max_sequence_length=64, backend="cpu")
        off = tuple(name for name, placement in plan.placements if placement.offload != "none")
        fitting.setdefault((plan["actor_train_step"].strategy.dp, off), quarters)
    assert fitting[2, ("ref_inference", "reward_inference")] < fitting[2, ()]


def test_two_devices_are_too_few_for_three_kinds_of_calls():
    with pytest.raises(InvalidInput, match="mesh: got 'n0:0-1', expected .*; its part n0:0 has no halves; separation-"):
        preset("separation-streamed", ppo(), TWO_DEVICES, WHOLE)


def test_a_plan_that_cannot_fit_is_refused_with_its_memory_use():
    tiny = ClusterShape("tiny", 1, 2, 1 << 20)
    with pytest.raises(PlanDoesNotFit, match=r"memory of n0:0: got .* MiB at ") as error:
        preset("flattening", ppo(), tiny, tiny.whole, backend="cpu")
    assert "no plan fits these devices: critic_train_step needs" in str(error.value)
    assert "n0:0 at actor_generate@1 holds:" in error.value.report
