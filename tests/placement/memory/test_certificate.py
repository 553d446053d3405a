"""The certificate against devices that are played through, in any order that the graph allows."""

import json
import random
from collections import defaultdict
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from prefect_rlhf.placement.augmented.augment import augment
from prefect_rlhf.placement.augmented.augmented_graph import AugmentedGraph
from prefect_rlhf.placement.augmented.work import HostCopy
from prefect_rlhf.placement.cost.workload import Workload
from prefect_rlhf.placement.devices.mesh import ClusterShape, Device
from prefect_rlhf.placement.layout.layout import layout_of
from prefect_rlhf.placement.layout.regions import num_elements
from prefect_rlhf.placement.memory.certificate import certify
from prefect_rlhf.placement.memory.savings import with_changes
from prefect_rlhf.placement.plan import instances, offloaded_parts
from prefect_rlhf.placement.planner.preset_plan import preset
from tests.support.by_device import instance_holdings
from tests.support.cases import examples
from tests.support.strategies import (
    GEMMA3,
    GIB,
    MIXTURE,
    QWEN2,
    QWEN3,
    SMALL,
    TWO_DEVICES,
    dpo,
    graphs,
    placed,
    plans,
    ppo,
)

pytestmark = pytest.mark.quick

WORK = Workload.fixed(8, 8)
ONE = ClusterShape("one", 1, 1, 8 * GIB)
ELEMENTS = 512 * 128 + 4 * (2 * 128 * 128 + 2 * 64 * 128 + 3 * 256 * 128 + 2 * 128) + 128  # of the small model


def kept(plan, graph, length=16, kind="cpu"):
    """Bytes on the first device by role, engine and what."""
    return {
        (holding.instance.role, holding.instance.engine, holding.what): holding.num_bytes
        for instance, calls in instances(graph, plan).items()
        for holding in instance_holdings(instance, calls, graph.model(instance.role), length, kind)
        if holding.device == Device(0, 0)
    }


def test_training_keeps_weights_gradients_and_a_share_of_the_optimizer():
    """bfloat16: 2 + 4 bytes an element, and 12 more divided over the replicas; Adam's counters besides."""
    found = kept(preset("flattening", dpo(), TWO_DEVICES, TWO_DEVICES.whole), dpo())
    assert found["ref", "megatron", "weights"] == 2 * ELEMENTS
    assert found["actor", "megatron", "weights"] == 2 * ELEMENTS  # already a multiple of what buffers are padded to
    assert found["actor", "megatron", "gradients"] == 4 * ELEMENTS
    assert found["actor", "megatron", "optimizer"] == 12 * ELEMENTS // 2 + 4 * (2 + 4 * 6)


def test_float32_weights_are_their_own_main_weights():
    graph = dpo()
    graph = replace(graph, models=tuple(replace(model, dtype="float32") for model in graph.models))
    found = kept(preset("flattening", graph, TWO_DEVICES, TWO_DEVICES.whole), graph)
    assert found["actor", "megatron", "weights"] == 4 * ELEMENTS
    assert found["actor", "megatron", "optimizer"] == 8 * ELEMENTS // 2 + 4 * (2 + 4 * 6)


@pytest.mark.parametrize("kind", ["cpu", "cuda"])
def test_generation_keeps_weights_tables_and_a_cache_for_its_rows(kind):
    """Four rows of at most 16 tokens take a block of 32 each. On CPU all but norms is there once more, packed."""
    found = kept(preset("flattening", ppo(), TWO_DEVICES, TWO_DEVICES.whole), ppo(), kind=kind)
    norms = 128 * (2 * 4 + 1)
    assert found["actor", "vllm", "weights"] == 2 * (ELEMENTS + 256 * 32) + 4 * 4 * 4
    assert found["actor", "vllm", "key-value cache"] == (4 + 2) * 32 * 2 * 4 * 2 * 32 * 2
    assert found.get(("actor", "vllm", "packed weights"), 0) == (2 * (ELEMENTS - norms) if kind == "cpu" else 0)


@given(st.data(), st.sampled_from([SMALL, QWEN2, QWEN3, GEMMA3, MIXTURE]))
@settings(max_examples=examples(90), deadline=None)
def test_a_devices_weights_match_its_layout(data, shape):
    """Each device has at least the bytes that its layout shows, and no more than padding beyond."""
    graph = data.draw(graphs())
    graph = replace(graph, models=tuple(replace(model, shape=shape) for model in graph.models))
    plan = data.draw(plans(graph, ClusterShape("four", 1, 4, GIB), offload=False))
    for instance, calls in instances(graph, plan).items():
        model = graph.model(instance.role)
        layout = layout_of(instance, model, plan.cluster.whole)
        for holding in instance_holdings(instance, calls, model, 64, "cuda"):
            if holding.what == "weights":
                rank = plan.cluster.whole.devices().index(holding.device)
                shown = 2 * sum(num_elements(region) for region in layout.of_rank(rank).values())
                assert shown <= holding.num_bytes <= shown + 2 * (256 * 32 + 64 * 128 + 64 * 60 + 512)


def play(augmented: AugmentedGraph, seed: int) -> dict[Device, int]:
    """The most bytes that instances keep on each device when nodes run one by one in a random allowed order.

    Of nodes that are ready and share something, the earlier one goes first, as device locks have it.
    """
    graph, plan = augmented.graph, augmented.plan
    sizes: dict[tuple[Device, object, str], int] = defaultdict(int)
    for instance, calls in instances(graph, plan).items():
        in_flight = tuple(call.cut(plan.parts(call.name)) for call in calls)
        for h in instance_holdings(instance, in_flight, graph.model(instance.role), WORK.longest, "cpu"):
            part = "optimizer" if h.what in ("gradients", "optimizer") else "rest"
            sizes[h.device, instance, part] += h.num_bytes
    away = {
        (i, p) for i, part in offloaded_parts(graph, plan).items() for p in ("optimizer", "rest")[: 1 + (part == "all")]
    }
    moves_with = {"all": ("optimizer", "rest"), "weights": ("rest",), "optimizer": ("optimizer",)}
    chance, left = random.Random(seed), {node.id: node for node in augmented}
    most: dict[Device, int] = defaultdict(int)
    while left:
        ready = [n for n in left.values() if not left.keys() & set(n.depends_on)]
        node = chance.choice(
            [n for i, n in enumerate(ready) if all(n.occupies.isdisjoint(before.occupies) for before in ready[:i])]
        )
        moved = set()
        if isinstance(node.work, HostCopy):
            moved = {(node.work.instance, part) for part in moves_with[node.work.part]}
        if node.kind == "reload":
            away -= moved
        for device in plan.cluster.whole.devices():
            held = sum(size for (at, i, p), size in sizes.items() if at == device and (i, p) not in away)
            most[device] = max(most[device], held)
        if node.kind == "offload":
            away |= moved
        del left[node.id]
    return most


@given(st.data(), st.integers(0, 10**6))
@settings(max_examples=examples(60), deadline=None)
def test_no_order_holds_more_than_is_certified(data, seed):
    graph = data.draw(graphs())
    augmented = augment(graph, data.draw(plans(graph, TWO_DEVICES)), 2)
    certified = dict(certify(augmented, WORK, "cpu").most_resident)
    for device, held in play(augmented, seed).items():
        assert held <= certified.get(str(device), 0)


def test_staying_and_visiting_models_are_counted_exactly():
    """One device, reference and actor's optimizer offloaded: they take turns, and everything else stays."""
    graph = ppo()
    plan = preset("flattening", graph, ONE, ONE.whole)
    for name, part in (("ref_inference", "all"), ("actor_train_step", "optimizer")):
        plan = placed(plan, name, offload=part)
    augmented = augment(graph, plan, 3)
    found = kept(plan, graph)
    visits = [
        sum(found["actor", "megatron", what] for what in ("gradients", "optimizer")),
        found["ref", "megatron", "weights"],
    ]
    expected = sum(found.values()) - min(visits)
    assert dict(certify(augmented, WORK, "cpu").most_resident) == {"n0:0": expected}
    assert max(play(augmented, 0).values()) == expected


@pytest.mark.parametrize("cluster", [ONE, TWO_DEVICES])
def test_with_everything_in_host_memory_the_certified_bytes_do_stand_there_in_some_order(cluster):
    """While the next step generates, the offload of the trained weights may not have begun; a run seldom shows that."""
    graph = ppo()
    plan = preset("flattening", graph, cluster, cluster.whole)
    for call in graph:
        plan = placed(plan, call.name, offload="all") if call.role else plan
    augmented = augment(graph, plan, 3)
    orders = [play(augmented, seed) for seed in range(40)]
    for device, certified in certify(augmented, WORK, "cpu").most_resident:
        assert max(held for order in orders for at, held in order.items() if str(at) == device) == certified


def with_trained(graph, plan, part):
    """The plan with this part of every trained instance offloaded."""
    for calls in instances(graph, plan).values():
        if any(call.kind == "train_step" for call in calls):
            plan = with_changes(plan, calls, offload=part, prefetch=part == "none" or plan[calls[0].name].prefetch)
    return plan


@given(st.data())
@settings(max_examples=examples(60), deadline=None)
def test_offloading_more_never_fills_a_device_more(data):
    """All of it is no more than the optimizer alone, which is no more than nothing, under every plan."""
    graph = data.draw(graphs())
    plan = data.draw(plans(graph, TWO_DEVICES))
    filled = [
        {
            peak.device: peak.num_bytes
            for peak in certify(augment(graph, with_trained(graph, plan, part), 3), WORK, "cuda").peaks
        }
        for part in ("none", "optimizer", "all")
    ]
    for none, optimizer, whole in zip(*(of.values() for of in filled), strict=True):
        assert whole <= optimizer <= none


def test_a_peak_includes_the_nodes_own_needs():
    graph = ppo()
    certificate = certify(augment(graph, preset("flattening", graph, ONE, ONE.whole), 2), WORK, "cpu")
    peak = certificate.fullest
    assert peak.node.startswith(("actor_train_step", "critic_train_step"))
    assert {share.what for share in peak.shares if share.passing} >= {"activations", "rows"}
    assert peak.resident_bytes == sum(
        kept(certificate_plan := preset("flattening", graph, ONE, ONE.whole), graph).values()
    )
    assert certificate_plan.name == certificate.plan


def test_the_machine_readable_form_has_every_byte():
    graph = ppo()
    certificate = certify(augment(graph, preset("split", graph, TWO_DEVICES, TWO_DEVICES.whole), 2), WORK, "cpu")
    told = json.loads(certificate.to_json())
    assert told["fits"] is True
    assert [peak["num_bytes"] for peak in told["peaks"]] == [peak.num_bytes for peak in certificate.peaks]
    assert [sum(s["num_bytes"] for s in peak["shares"]) for peak in told["peaks"]] == [
        peak["num_bytes"] for peak in told["peaks"]
    ]


def test_equal_devices_share_a_row_of_the_table_and_keep_their_names_in_json():
    cluster = ClusterShape("eight", 2, 4, 8 * GIB)
    graph = ppo()
    certificate = certify(augment(graph, preset("flattening", graph, cluster, cluster.whole), 2), WORK, "cuda")
    assert [row["devices"] for row in certificate.rows()] == ["n0-1:0-3"]
    told = json.loads(certificate.to_json())["peaks"]
    assert [peak["device"] for peak in told] == [str(device) for device in cluster.whole.devices()]
