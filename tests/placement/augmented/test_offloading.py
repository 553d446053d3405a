"""What is offloaded leaves between its uses and is back in time, by part, with the copies beside other calls."""

from __future__ import annotations

from dataclasses import replace

import networkx as nx
import pytest

from prefect_rlhf.placement.augmented.augment import augment
from prefect_rlhf.placement.augmented.augmented_graph import AugmentedGraph
from prefect_rlhf.placement.augmented.work import HostCopy
from prefect_rlhf.placement.cost.workload import Workload
from prefect_rlhf.placement.devices.mesh import ClusterShape, Device
from prefect_rlhf.placement.graph import DataflowGraph
from prefect_rlhf.placement.memory.certificate import certify
from prefect_rlhf.placement.planner.preset_plan import preset
from tests.strategies import GIB, dependency_graph, placed, ppo

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
    assert moves(augmented, 1) == ["reload.actor.megatron.optimizer@1", "offload.actor.megatron.optimizer@1"]
    ancestors = nx.ancestors(dependency_graph(augmented), "reallocate.actor.vllm@1")
    assert "offload.actor.megatron.optimizer@0" not in augmented.node("reallocate.actor.vllm@1").depends_on
    assert "reload.actor.megatron.optimizer@1" not in ancestors
    reload = augmented.node("reload.actor.megatron.optimizer@1")
    assert (reload.work.part, reload.title) == (
        "optimizer",
        "actor.megatron.reload (optimizer) · step 1 · n0:0 dp1 · v1",
    )
    assert reload.id in augmented.node("actor_train_step@1").depends_on


def test_weights_and_cache_of_generation_are_away_from_its_last_generate_to_the_next_version():
    """Trained weights are on their way when the copy comes back: not during the train_step that makes them."""
    augmented = on_one_device(ppo(), actor_generate="all")
    assert moves(augmented, 1) == ["reload.actor.vllm@1", "offload.actor.vllm@1"]
    assert augmented.node("offload.actor.vllm@1").depends_on == ("reallocate.actor.vllm@1", "actor_generate@1")
    assert "actor_train_step@0" in augmented.node("reload.actor.vllm@1").depends_on


def test_a_reload_runs_beside_the_call_before_and_not_before_that():
    augmented = on_one_device(ppo(), ref_inference="all")
    order = dependency_graph(augmented)
    assert "actor_generate@1" not in nx.ancestors(order, "reload.ref.megatron@1")
    assert "reallocate.actor.vllm@1" in nx.ancestors(order, "reload.ref.megatron@1")


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


def test_memory_counts_what_comes_and_goes_by_part():
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
    assert "actor_generate@1" not in nx.ancestors(dependency_graph(early), "reload.ref.megatron@1")
    assert "actor_generate@1" in nx.ancestors(dependency_graph(late), "reload.ref.megatron@1")
    beside = {node.id for node in late if "compute" in node.resources} - {"ref_inference@1"}
    order = dependency_graph(late)
    before, after = nx.ancestors(order, "reload.ref.megatron@1"), nx.descendants(order, "offload.ref.megatron@1")
    assert beside <= before | after


def test_two_optimizers_on_one_device_take_turns():
    away = dict.fromkeys(("actor_train_step", "critic_inference", "critic_train_step"), "optimizer")
    augmented = on_one_device(ppo(), **away)
    assert "offload.actor.megatron.optimizer@1" in augmented.node("reload.critic.megatron.optimizer@1").depends_on
