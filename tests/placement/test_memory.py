"""Static memory, counted by hand for one small model."""

from dataclasses import replace

import pytest

from prefect_rlhf.placement.errors import InvalidInput
from prefect_rlhf.placement.memory import check_memory, holdings, offload_to_fit, peak_bytes
from prefect_rlhf.placement.mesh import ClusterShape, Device
from prefect_rlhf.placement.presets import preset
from tests.strategies import GIB, SMALL, SMOLLM2, TWO_DEVICES, dpo, placed, ppo

# the small model: embedding, four layers (q and o, k and v, three of the feed-forward, two norms), final norm
ELEMENTS = 512 * 128 + 4 * (2 * 128 * 128 + 2 * 64 * 128 + 3 * 256 * 128 + 2 * 128) + 128
CACHE = 2 * 4 * 2 * 32 * 2  # keys and values, layers, heads, head size, bytes: of one token


def found(plan, graph, length=10):
    """Bytes on the first device by role, engine and what."""
    return {
        (h.instance.role, h.instance.engine, h.what): h.num_bytes
        for h in holdings(plan, graph, length)
        if h.device == Device(0, 0)
    }


def test_training_keeps_weights_gradients_and_a_share_of_the_optimizer():
    """bfloat16: 2 + 4 bytes an element, and 12 more divided over the replicas."""
    plan = preset("flattening", dpo(), TWO_DEVICES, TWO_DEVICES.whole)
    assert found(plan, dpo()) == {
        ("ref", "megatron", "weights"): 2 * ELEMENTS,
        ("actor", "megatron", "weights"): 2 * ELEMENTS,
        ("actor", "megatron", "gradients"): 4 * ELEMENTS,
        ("actor", "megatron", "optimizer"): 12 * ELEMENTS // 2,
    }


def test_float32_weights_are_their_own_main_weights():
    graph = dpo()
    graph = replace(graph, models=tuple(replace(model, dtype="float32") for model in graph.models))
    plan = preset("flattening", graph, TWO_DEVICES, TWO_DEVICES.whole)
    kept = found(plan, graph)
    assert kept["actor", "megatron", "weights"] == 4 * ELEMENTS
    assert kept["actor", "megatron", "optimizer"] == 8 * ELEMENTS // 2


def test_the_order_says_which_device_has_which_stage():
    """The first stage, with its larger share of the layers, is on the device that the order names first."""
    graph = replace(ppo(), models=tuple(replace(m, shape=replace(SMALL, num_layers=5)) for m in ppo().models))
    plan = preset("flattening", graph, TWO_DEVICES, TWO_DEVICES.whole)
    plan = placed(plan, "critic_inference", dp=1, pp=2, order=(1, 0))
    held = {
        holding.device: holding.num_bytes
        for holding in holdings(plan, graph, 64)
        if holding.instance.strategy.pp == 2 and holding.what == "weights"
    }
    assert held[Device(0, 1)] > held[Device(0, 0)]


def test_generation_keeps_weights_and_a_cache_for_the_replicas_rows():
    plan = preset("flattening", ppo(), TWO_DEVICES, TWO_DEVICES.whole)
    kept = found(plan, ppo(), length=10)
    assert kept["actor", "vllm", "weights"] == 2 * ELEMENTS
    assert kept["actor", "vllm", "key-value cache"] == 4 * 10 * CACHE


def test_megatron_keeps_a_cache_for_its_stage_of_what_it_generates():
    """Half of the layers and half of the heads; the copy that trains is the one that generates."""
    cluster = ClusterShape("small", 1, 4, 8 * GIB)
    graph = ppo()
    plan = preset("flattening", graph, cluster, cluster.whole)
    split = {"dp": 1, "tp": 2, "pp": 2, "engine": "megatron"}
    trainer = graph.trained_by("actor").name
    plan = placed(placed(plan, "actor_generate", **split), trainer, **split)
    caches = [h for h in holdings(plan, graph, 10) if h.what == "key-value cache"]
    assert [str(h.device) for h in caches] == ["n0:0", "n0:1", "n0:2", "n0:3"]
    assert {h.num_bytes for h in caches} == {8 * 10 * CACHE // 4}
    assert len({h.instance for h in holdings(plan, graph, 10) if h.instance.role == "actor"}) == 1


def test_offloaded_roles_count_one_at_a_time():
    graph = ppo()
    plan = preset("flattening", graph, TWO_DEVICES, TWO_DEVICES.whole)
    device = Device(0, 0)
    full = peak_bytes(plan, graph, holdings(plan, graph, 10))[device]
    for name in ("ref_inference", "reward_inference"):
        plan = placed(plan, name, offload="all")
    less = peak_bytes(plan, graph, holdings(plan, graph, 10))[device]
    assert full - less == 2 * ELEMENTS  # the reference comes and goes; the reward model takes its turn


def test_the_refusal_is_a_table_of_what_fills_the_device():
    graph = ppo()
    cluster = ClusterShape("tiny", 1, 2, 8 << 20)
    plan = preset("flattening", graph, TWO_DEVICES, TWO_DEVICES.whole)
    plan = replace(plan, cluster=cluster)
    with pytest.raises(InvalidInput) as error:
        check_memory(plan, graph, 64)
    first, *rest = str(error.value).splitlines()
    assert first.startswith("plan flattening: memory of n0:0: got '0.0")
    assert "offload frozen roles" in first
    sizes = [float(line.split()[0]) for line in rest]
    assert sizes == sorted(sizes, reverse=True)
    assert len(rest) == len(found(plan, graph, 64))


def test_a_plan_that_fits_is_left_alone():
    plan = preset("flattening", ppo(), TWO_DEVICES, TWO_DEVICES.whole)
    assert offload_to_fit(plan, ppo()) is plan
    assert check_memory(plan, ppo()) is plan


def test_trained_roles_are_never_offloaded_on_their_own():
    graph = ppo()
    plan = preset("flattening", graph, TWO_DEVICES, TWO_DEVICES.whole)
    plan = replace(plan, cluster=ClusterShape("tiny", 1, 2, 1))
    off = {name for name, placement in offload_to_fit(plan, graph).placements if placement.offload != "none"}
    assert off == {"ref_inference", "reward_inference"}


def test_the_demos_models_fit_the_demos_devices():
    """What the two-device mesh of a small machine is used for must not be refused."""
    graph = replace(ppo(), models=tuple(replace(model, shape=SMOLLM2) for model in ppo().models))
    cluster = ClusterShape("embedded", 1, 2, 8 * GIB)
    plan = preset("flattening", graph, cluster, cluster.whole, max_sequence_length=64)
    assert not any(placement.offload != "none" for _, placement in plan.placements)
