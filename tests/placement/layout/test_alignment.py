"""Which device gets which coordinate: the most overlap with what is held, and HybridFlow's figure 8 as a case of it."""

from dataclasses import replace
from itertools import permutations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from prefect_rlhf.placement.devices.mesh import ClusterShape, DeviceMesh
from prefect_rlhf.placement.devices.strategy import Strategy
from prefect_rlhf.placement.layout.alignment import aligned, overlapping_order
from prefect_rlhf.placement.layout.layout import layout_of
from prefect_rlhf.placement.layout.reshard import reshard
from prefect_rlhf.placement.models.model import Experts, TransformerShape
from prefect_rlhf.placement.models.weights import parameters
from prefect_rlhf.placement.plan import ExecutionPlan, ModelInstance
from tests.support.cases import examples
from tests.support.strategies import GIB, SMALL, degrees, model, on, ppo

MESH = DeviceMesh(0, 2, 0, 4)
FOUR_KV = replace(SMALL, num_kv_heads=4)
TINY = TransformerShape(8, 8, 3, 4, 4, 2, 8, 16, 1e4, 1e-5, tied_embeddings=False)
TINY_MIXTURE = replace(TINY, family="mixtral", experts=Experts(4, 2))


def instance(engine, mesh=MESH, order=(), **degrees):
    return ModelInstance("actor", engine, mesh, Strategy(**degrees), order)


def painted(which, spec, lease):
    """For each rank a flat array that is true where it holds an element of the model."""
    layout = layout_of(which, spec, lease)
    arrays = []
    for rank in range(lease.num_devices):
        parts = []
        for name, shape in layout.shapes.items():
            part = np.zeros(shape, bool)
            if rank in layout.regions[name]:
                part[tuple(slice(*span) for span in layout.regions[name][rank])] = True
            parts.append(part.ravel())
        arrays.append(np.concatenate(parts))
    return np.stack(arrays)


def split_elements(spec):
    """M, of what tp splits; norms are everywhere and count for nothing here."""
    return sum(p.num_elements for p in parameters(spec) if p.split_axis is not None)


def figure_8(order):
    """Per device: elements that are sent to it, held in generation, and trained but of no use in generation."""
    spec = model("actor", shape=FOUR_KV)
    train, generate = instance("megatron", dp=2, tp=4), instance("vllm", dp=4, tp=2, order=order)
    moved = np.zeros(8, int)
    for piece in reshard(layout_of(train, spec, MESH), layout_of(generate, spec, MESH)).moved:
        moved[piece.target] += piece.num_elements
    norms = sum(p.num_elements for p in parameters(spec)) - split_elements(spec)
    held, wanted = painted(train, spec, MESH), painted(generate, spec, MESH)
    return moved, (held | wanted).sum(1) - norms, (held & ~wanted).sum(1), split_elements(spec)


def test_figure_8_of_hybridflow():
    """Training 1-4-2, generation 1-2-2-2 on 2 x 4 GPUs: each is sent M/4, peaks at M/2 and keeps nothing of no use."""
    order = overlapping_order(instance("vllm", dp=4, tp=2), instance("megatron", dp=2, tp=4), model("a", shape=FOUR_KV))
    moved, peak, redundant, size = figure_8(order)
    assert (moved == size // 4).all()
    assert (peak == size // 2).all()
    assert (redundant == 0).all()
    groups = [{order[i], order[i + 1]} for i in range(0, 8, 2)]
    assert all(group & {0, 1, 4, 5} and group & {2, 3, 6, 7} for group in groups)
    assert all(len({position // 4 for position in group}) == 1 for group in groups)


def test_figure_8_in_the_plain_order():
    """G2, G3, G6 and G7 keep the M/4 that they train beside the M/2 that they generate with."""
    moved, peak, redundant, size = figure_8(())
    assert redundant.tolist() == [0, size // 4, size // 4, 0] * 2
    assert peak.tolist() == [size // 2, size * 3 // 4, size * 3 // 4, size // 2] * 2
    assert moved.tolist() == [size // 4, size // 2, size // 2, size // 4] * 2


@settings(max_examples=examples(40), deadline=None)
@given(degrees(4, experts=True), degrees(4, experts=True), st.permutations(range(4)), st.booleans(), st.booleans())
def test_no_order_on_one_node_overlaps_more(train, infer, held_order, narrower, mixture):
    """Against all orders; of those that overlap most it has most devices in their plain place."""
    spec = model("actor", shape=TINY_MIXTURE if mixture else TINY)
    train, infer = (one if mixture else replace(one, ep=1) for one in (train, infer))
    lease = DeviceMesh(0, 1, 0, 4)
    if train.pp > 3 or infer.pp > 3:
        return
    held = ModelInstance("actor", "megatron", lease, train, tuple(held_order))
    mesh = DeviceMesh(0, 1, 0, 2) if narrower else lease
    target = ModelInstance("actor", "megatron", mesh, Strategy(dp=2) if narrower else infer)
    have = painted(held, spec, lease)

    def quality(order):
        overlap = int((have & painted(replace(target, device_order=tuple(order)), spec, lease)).sum())
        return overlap, sum(place == position for place, position in enumerate(order))

    size = mesh.num_devices
    found = overlapping_order(target, held, spec) or range(size)
    assert quality(found) == max(quality(order) for order in permutations(range(size)))


@settings(max_examples=examples(60), deadline=None)
@given(degrees(8), degrees(8), st.sampled_from([1, 2, 4]))
def test_no_tensor_parallel_group_is_torn_over_more_nodes(train, infer, num_nodes):
    if max(train.tp, infer.tp) > 4 or max(train.pp, infer.pp) > 3:
        return
    mesh = DeviceMesh(0, num_nodes, 0, 8 // num_nodes)
    target = ModelInstance("actor", "megatron", mesh, infer)
    order = overlapping_order(target, ModelInstance("actor", "megatron", mesh, train), model("actor", shape=TINY))

    def spans(devices):
        return [len({d.node for d in devices[i : i + infer.tp]}) for i in range(0, 8, infer.tp)]

    found, plain = spans(replace(target, device_order=order).devices), spans(mesh.devices())
    assert sorted(order) == list(range(8)) or order == ()
    assert all(a <= b for a, b in zip(found, plain, strict=True))


def ppo_plan(**orders):
    cluster = ClusterShape("desk", 1, 4, 64 * GIB)
    tp4, tp2 = on("n0:0-3", "megatron", tp=4), on("n0:0-3", "megatron", dp=2, tp=2)
    placements = {
        "actor_generate": on("n0:0-3", "vllm", dp=2, tp=2),
        "ref_inference": tp2,
        "reward_inference": tp2,
        "critic_inference": tp2,
        "advantages": on("n0:0", "python"),
        "actor_train_step": tp4,
        "critic_train_step": tp4,
    }
    placed = {name: replace(placement, device_order=orders.get(name, ())) for name, placement in placements.items()}
    graph = ppo()
    graph = replace(graph, models=tuple(replace(m, shape=FOUR_KV) for m in graph.models))
    return aligned(ExecutionPlan("mine", cluster, tuple(placed.items())), graph)


def test_only_copies_of_trained_weights_are_reordered():
    plan = ppo_plan()
    reordered = {name for name, placement in plan.placements if placement.device_order}
    assert reordered == {"actor_generate", "critic_inference"}
    assert {frozenset(plan["actor_generate"].device_order[i : i + 2]) for i in (0, 2)} == {
        frozenset({0, 2}),
        frozenset({1, 3}),
    }


def test_an_order_that_the_plan_states_is_kept():
    """The plain one too; and copies follow a trained instance that is itself out of order."""
    assert ppo_plan(actor_generate=(0, 1, 2, 3))["actor_generate"].device_order == (0, 1, 2, 3)
    plan = ppo_plan(actor_train_step=(3, 1, 0, 2))
    assert plan["actor_train_step"].device_order == (3, 1, 0, 2)
    first, second = (set(plan["actor_generate"].device_order[i : i + 2]) for i in (0, 2))
    assert all(len(pair & {3, 1}) == 1 and len(pair & {0, 2}) == 1 for pair in (first, second))


@pytest.mark.parametrize("engine", ["megatron", "vllm"])
def test_the_same_split_keeps_the_plain_order(engine):
    spec = model("actor", shape=FOUR_KV)
    held = instance("megatron", dp=4, tp=2)
    assert overlapping_order(instance(engine, dp=4, tp=2), held, spec) == ()
