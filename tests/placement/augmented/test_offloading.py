"""What is offloaded leaves between its uses and is back in time, by part, with the copies beside other calls."""

from __future__ import annotations

from dataclasses import replace

import networkx as nx
import pytest

from prefect_rlhf.placement import engine_traits
from prefect_rlhf.placement.augmented.augment import augment
from prefect_rlhf.placement.augmented.augmented_graph import AugmentedGraph
from prefect_rlhf.placement.augmented.work import HostCopy
from prefect_rlhf.placement.cost.workload import Workload
from prefect_rlhf.placement.devices.mesh import ClusterShape, Device
from prefect_rlhf.placement.graph import DataflowGraph
from prefect_rlhf.placement.memory.certificate import certify
from prefect_rlhf.placement.models.adapter import AdapterSpec
from prefect_rlhf.placement.planner.preset_plan import preset
from tests.support.strategies import GIB, dependency_graph, placed, ppo

ONE = ClusterShape("one", 1, 1, 8 * GIB, backend="cpu")
ELEMENTS = 512 * 128 + 4 * (2 * 128 * 128 + 2 * 64 * 128 + 3 * 256 * 128 + 2 * 128) + 128  # of the small model


def on_one_device(graph: DataflowGraph, num_steps: int = 3, **offloaded: str) -> AugmentedGraph:
    plan = preset("flattening", graph, ONE, ONE.whole)
    for name, part in offloaded.items():
        plan = placed(plan, name, offload=part)
    return augment(graph, plan, num_steps)


def moves(augmented: AugmentedGraph, step: int) -> list[str]:
    return [node.id for node in augmented.of_step(step) if node.kind in ("reload", "offload")]


def test_an_optimizer_is_away_between_train_steps_while_its_weights_serve():
    """Its reallocate, which reads the weights alone, does not bring it back."""
    augmented = on_one_device(ppo(), actor_train_step="optimizer")
    assert moves(augmented, 2) == ["reload.actor.megatron.optimizer@2", "offload.actor.megatron.optimizer@2"]
    ancestors = nx.ancestors(dependency_graph(augmented), "reallocate.actor.vllm@2")
    assert "offload.actor.megatron.optimizer@1" not in augmented.node("reallocate.actor.vllm@2").depends_on
    assert "reload.actor.megatron.optimizer@2" not in ancestors
    reload = augmented.node("reload.actor.megatron.optimizer@2")
    assert (reload.work.part, reload.title) == (
        "optimizer",
        "actor.megatron.reload (optimizer) · step 2 · n0:0 dp1 · v1",
    )
    assert reload.id in augmented.node("actor_train_step@2").depends_on


def test_weights_and_cache_of_generation_are_away_from_its_last_generate_to_the_next_version():
    """Trained weights are on their way when the copy comes back: not during the train_step that makes them."""
    augmented = on_one_device(ppo(), actor_generate="all")
    assert moves(augmented, 2) == ["reload.actor.vllm@2", "offload.actor.vllm@2"]
    assert augmented.node("offload.actor.vllm@2").depends_on == ("reallocate.actor.vllm@2", "actor_generate@2")
    assert "actor_train_step@1" in augmented.node("reload.actor.vllm@2").depends_on


def test_a_reload_overlaps_only_with_the_previous_call():
    augmented = on_one_device(ppo(), ref_inference="all")
    order = dependency_graph(augmented)
    assert "actor_generate@2" not in nx.ancestors(order, "reload.ref.megatron@2")
    assert "reallocate.actor.vllm@2" in nx.ancestors(order, "reload.ref.megatron@2")


@pytest.mark.parametrize("part", ["all", "optimizer"])
def test_copies_occupy_the_host_link_and_calls_the_compute(part):
    augmented = on_one_device(ppo(), 1, actor_train_step=part)
    device = Device(0, 0)
    for node in augmented:
        resource = "host_link" if node.kind in ("offload", "reload") else "compute"
        assert node.occupies == {(device, resource)}


@pytest.mark.parametrize(("backend", "stops"), [("cuda", True), ("cpu", False)])
def test_vllms_copies_stop_their_devices_on_cuda_alone(backend, stops):
    """Its sleep and wake-up hold up every stream of the device; others' copies run beside calls."""
    graph = ppo()
    plan = preset("flattening", graph, ONE, ONE.whole)
    for name in ("actor_generate", "ref_inference"):
        plan = placed(plan, name, offload="all")
    augmented = augment(graph, replace(plan, cluster=replace(ONE, backend=backend)), 2)
    for node in (node for node in augmented if isinstance(node.work, HostCopy) and node.work.part == "all"):
        assert ("compute" in node.resources) is (stops and node.work.instance.engine == "vllm")
        assert "host_link" in node.resources


def resident_bytes(graph, plan):
    """The most that instances keep on the device at any moment."""
    certificate = certify(augment(graph, plan, 3), Workload.fixed(5, 5), "cuda")
    return dict(certificate.most_resident)["n0:0"]


def test_memory_counts_each_offloaded_part():
    """The actor's gradients and optimizer (bfloat16: 4 + 12 bytes an element) take turns with the reference (2)."""
    graph = ppo()
    plan = preset("flattening", graph, ONE, ONE.whole)
    kept = [resident_bytes(graph, plan)]
    for name, part in (("ref_inference", "all"), ("actor_train_step", "optimizer")):
        plan = placed(plan, name, offload=part)
        kept.append(resident_bytes(graph, plan))
    assert (kept[0] - kept[1], kept[1] - kept[2]) == (0, 2 * ELEMENTS)


def test_without_prefetch_no_other_call_has_it_on_its_devices():
    """Largest on one device is the train_step, which then does without the reference that it would wait beside."""
    graph = ppo()
    plan = placed(preset("flattening", graph, ONE, ONE.whole), "ref_inference", offload="all")
    early, late = (augment(graph, placed(plan, "ref_inference", prefetch=prefetch), 2) for prefetch in (True, False))
    assert "actor_generate@2" not in nx.ancestors(dependency_graph(early), "reload.ref.megatron@2")
    assert "actor_generate@2" in nx.ancestors(dependency_graph(late), "reload.ref.megatron@2")
    beside = {node.id for node in late if "compute" in node.resources} - {"ref_inference@2"}
    order = dependency_graph(late)
    before, after = nx.ancestors(order, "reload.ref.megatron@2"), nx.descendants(order, "offload.ref.megatron@2")
    assert beside <= before | after


def copies(augmented: AugmentedGraph, instance: str) -> list[tuple[str, bool]]:
    """The reloads and offloads of an instance, each with whether it copies anything."""
    found = [node for node in augmented if isinstance(node.work, HostCopy) and instance in node.id]
    return [(node.id.partition(".")[0] + node.id[node.id.index("@") :], node.work.copies) for node in found]


def test_frozen_weights_are_dropped_and_reloaded():
    augmented = on_one_device(ppo(), 2, ref_inference="all")
    assert copies(augmented, "ref") == [
        ("reload@1", True),
        ("offload@1", False),
        ("reload@2", True),
        ("offload@2", False),
    ]
    dropped = augmented.node("offload.ref.megatron@2")
    assert dropped.title == "ref.megatron.offload (dropped) · step 2 · n0:0 dp1 · v0"
    assert dropped.reason.endswith("it is dropped, since the host has the same copy.")


def test_a_copy_that_is_overwritten_never_crosses_the_host_link():
    """Not in the first step either: version 0 comes from the trained weights."""
    augmented = on_one_device(ppo(), 3, actor_generate="all")
    assert {node for node, copied in copies(augmented, "actor.vllm") if copied} == set()
    for step in (1, 2, 3):
        move = augmented.node(f"reallocate.actor.vllm@{step}")
        assert move.reads == step - 1 and f"reload.actor.vllm@{step}" in move.depends_on
    assert augmented.node("reload.actor.vllm@2").title == "actor.vllm.reload (no weights) · step 2 · n0:0 dp1 · v1"


def test_a_copy_with_a_frozen_base_comes_back_with_its_content():
    """A reallocation brings the adapter alone, so what it does not write has to come from the host."""
    graph, adapter = ppo(), AdapterSpec(4, 8.0, ("q_proj",))
    models = [replace(each, adapter=adapter) if each.role == "actor" else each for each in graph.models]
    augmented = on_one_device(replace(graph, models=tuple(models)), 3, actor_generate="all")
    assert {copied for node, copied in copies(augmented, "actor.vllm") if node.startswith("reload")} == {True}
    assert augmented.node("reallocate.actor.vllm@2").reads == 1


def test_a_version_that_is_used_again_goes_to_the_host():
    """Under staleness 1, step 2 generates with version 0 too."""
    augmented = on_one_device(ppo(1), 4, actor_generate="all")
    assert [node for node, copied in copies(augmented, "actor.vllm") if copied] == ["offload@1", "reload@2"]


def test_of_trained_weights_only_what_training_changed_goes_to_the_host():
    """They come twice a step, for the move to vLLM and for the train_step, since the critic's optimizer is between.

    The optimizer comes for the train_step alone.
    """
    critic = {"critic_inference": "optimizer", "critic_train_step": "optimizer"}
    augmented = on_one_device(ppo(), 3, actor_generate="all", actor_train_step="all", **critic)
    of_step = [node for node in augmented.of_step(2) if node.id.startswith("offload.actor.megatron.weights")]
    assert [node.work.copies for node in of_step] == [False, True]
    assert copies(augmented, "actor.megatron.optimizer")[2:4] == [("reload@2", True), ("offload@2", True)]


def test_an_offloaded_optimizer_is_loaded_only_for_its_train_step():
    """The move to vLLM needs the weights, so their offload may run beside the generate; the rest went before both."""
    augmented = on_one_device(ppo(), 2, actor_generate="all", actor_train_step="all")
    order = dependency_graph(augmented)
    assert "offload.actor.megatron.optimizer@1" in nx.ancestors(order, "reallocate.actor.vllm@2")
    assert "actor_generate@2" not in nx.descendants(order, "offload.actor.megatron.weights.2@1")
    assert "reallocate.actor.vllm@2" in nx.ancestors(order, "offload.actor.megatron.weights.2@1")
    reload = augmented.node("reload.actor.megatron.weights@2")
    assert reload.title == "actor.megatron.reload (weights) · step 2 · n0:0 dp1 · v1"
    for part in ("weights", "optimizer"):
        assert f"reload.actor.megatron.{part}@2" in augmented.node("actor_train_step@2").depends_on


def test_an_engine_that_cannot_drop_copies_each_time():
    name = "copies_each_time"
    engine_traits.register(name, replace(engine_traits.TRAITS["megatron"], drops_weights=False))
    try:
        graph = ppo()
        plan = preset("flattening", graph, ONE, ONE.whole)
        augmented = augment(graph, placed(plan, "ref_inference", offload="all", engine=name), 2)
    finally:
        del engine_traits._TRAITS[name]
    assert all(copied for _, copied in copies(augmented, "ref"))


def test_two_optimizers_on_a_device_take_turns():
    away = dict.fromkeys(("actor_train_step", "critic_inference", "critic_train_step"), "optimizer")
    augmented = on_one_device(ppo(), **away)
    assert "offload.actor.megatron.optimizer@2" in augmented.node("reload.critic.megatron.optimizer@2").depends_on
