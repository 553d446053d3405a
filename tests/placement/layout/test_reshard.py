"""Reshard plans against whole numpy tensors."""

from collections import Counter, defaultdict
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from prefect_rlhf.errors.errors import InvalidInput
from prefect_rlhf.placement.devices.mesh import ClusterShape, Device, DeviceMesh
from prefect_rlhf.placement.devices.strategy import Strategy
from prefect_rlhf.placement.layout.alignment import overlapping_order
from prefect_rlhf.placement.layout.layout import Layout, layout_of
from prefect_rlhf.placement.layout.reshard import reshard
from prefect_rlhf.placement.models.weights import parameters
from prefect_rlhf.placement.plan import ModelInstance
from tests.support.cases import examples
from tests.support.layouts import megatron_layout, num_lacking, vllm_layout
from tests.support.strategies import SMALL, degrees, meshes, model

SHAPES = {"a": (6,), "b": (6, 4)}


def cut(region):
    return tuple(slice(start, stop) for start, stop in region)


@st.composite
def regions(draw, shape):
    spans = [sorted(draw(st.lists(st.integers(0, size), min_size=2, max_size=2, unique=True))) for size in shape]
    return tuple((start, stop) for start, stop in spans)


@st.composite
def layouts(draw, complete: bool):
    """Any regions on any of five ranks; when `complete`, some rank holds everything."""
    held = {}
    for name, shape in SHAPES.items():
        held[name] = draw(st.dictionaries(st.integers(0, 4), regions(shape), max_size=4))
        if complete:
            held[name][draw(st.integers(0, 4))] = tuple((0, size) for size in shape)
    return Layout(SHAPES, held)


@given(layouts(complete=True), layouts(complete=False))
def test_the_pieces_fill_the_target_exactly(source, target):
    """Each element arrives once, with its value; none is sent to a rank that holds it."""
    for name, shape in SHAPES.items():
        whole = np.arange(np.prod(shape)).reshape(shape)
        filled = {rank: np.full(shape, -1) for rank in target.regions[name]}
        times = {rank: np.zeros(shape, int) for rank in target.regions[name]}
        for piece in reshard(source, target):
            if piece.parameter != name:
                continue
            held = np.zeros(shape, bool)
            held[cut(source.regions[name][piece.source])] = True
            assert held[cut(piece.region)].all()
            filled[piece.target][cut(piece.region)] = whole[cut(piece.region)]
            times[piece.target][cut(piece.region)] += 1
            if piece.source != piece.target and piece.target in source.regions[name]:
                own = np.zeros(shape, bool)
                own[cut(source.regions[name][piece.target])] = True
                assert not own[cut(piece.region)].any()
        for rank, region in target.regions[name].items():
            inside = np.zeros(shape, bool)
            inside[cut(region)] = True
            assert (filled[rank][inside] == whole[inside]).all()
            assert (times[rank] == inside).all()


def test_local_pieces_stay_and_moved_pieces_go():
    plan = reshard(Layout(SHAPES, {"a": {0: ((0, 6),)}}), Layout(SHAPES, {"a": {0: ((0, 3),), 1: ((3, 6),)}}))
    assert [(piece.source, piece.target) for piece in plan.local] == [(0, 0)]
    assert [(piece.source, piece.target, piece.num_elements) for piece in plan.moved] == [(0, 1, 3)]


def test_equal_layouts_need_no_moves():
    layout = megatron_layout(model("actor"), Strategy(dp=2, tp=2), (0, 1, 2, 3))
    assert reshard(layout, layout).moved == ()


def test_training_to_generation_with_equal_ranks_and_tp_needs_no_moves():
    """The usual hand-over: dp2 tp2 in Megatron, two replicas of tp2 in vLLM."""
    train = megatron_layout(model("actor"), Strategy(dp=2, tp=2), (0, 1, 2, 3))
    assert reshard(train, vllm_layout(model("actor"), Strategy(dp=2, tp=2), (0, 1, 2, 3))).moved == ()


def test_from_tp_to_dp_each_rank_is_sent_the_half_it_lacks():
    train = megatron_layout(model("actor"), Strategy(tp=2), (0, 1))
    plan = reshard(train, vllm_layout(model("actor"), Strategy(dp=2), (0, 1)))
    split = sum(np.prod(shape) for name, shape in train.shapes.items() if len(shape) == 2)
    received = Counter()
    for piece in plan.moved:
        received[piece.target] += piece.num_elements
    assert received == {0: split // 2, 1: split // 2}


def test_holders_on_the_same_node_are_asked_and_share_the_load():
    whole = {"a": ((0, 6),), "b": ((0, 6), (0, 4))}
    source = Layout(SHAPES, {name: dict.fromkeys((0, 1, 2), region) for name, region in whole.items()})
    target = Layout(SHAPES, {name: dict.fromkeys((3, 4), region) for name, region in whole.items()})
    devices = [Device(0, 0), Device(1, 0), Device(1, 1), Device(1, 2), Device(0, 1)]
    sources = {(piece.target, piece.parameter): piece.source for piece in reshard(source, target, devices)}
    assert {sources[4, "a"], sources[4, "b"]} == {0}
    assert {sources[3, "a"], sources[3, "b"]} == {1, 2}


def test_without_devices_all_replicas_share_the_load():
    layout = megatron_layout(model("actor"), Strategy(dp=2), (0, 1))
    sent = Counter()
    for piece in reshard(layout, vllm_layout(model("actor"), Strategy(dp=2), (2, 3))).moved:
        sent[piece.source] += piece.num_elements
    largest = SMALL.vocab_size * SMALL.hidden_size
    assert abs(sent[0] - sent[1]) <= largest


def test_a_source_that_lacks_something_is_refused():
    source = Layout(SHAPES, {"a": {0: ((0, 3),)}})
    with pytest.raises(InvalidInput, match=r"layout.a: got \(\(3, 6\),\)"):
        reshard(source, Layout(SHAPES, {"a": {1: ((0, 6),)}}))


@pytest.mark.parametrize(
    ("source", "target", "says"),
    [
        ({"a": (6,)}, {"a": (7,)}, r"layout.a: got \(6,\), expected \(7,\) as in the target"),
        ({}, {"a": (7,)}, r"layout.a: got None, expected \(7,\) as in the target"),
        ({"a": (6,), "b": (2,)}, {"a": (6,)}, r"layout.b: got \(2,\), expected no such parameter"),
    ],
)
def test_layouts_of_different_models_are_refused(source, target, says):
    with pytest.raises(InvalidInput, match=says):
        reshard(Layout(source, {}), Layout(target, {}))


def test_another_vocabulary_is_refused_by_name():
    """Two engines that disagree on it cannot exchange weights."""
    one, other = (model("actor", shape=replace(SMALL, vocab_size=size)) for size in (512, 500))
    with pytest.raises(
        InvalidInput, match=r"layout.model.embed_tokens.weight: got \(512, 128\), expected \(500, 128\)"
    ):
        reshard(megatron_layout(one, Strategy(tp=2), (0, 1)), vllm_layout(other, Strategy(dp=2), (0, 1)))


LEASES = {"one node": DeviceMesh(0, 1, 0, 8), "two nodes": DeviceMesh(0, 2, 0, 4)}
ODD = replace(SMALL, num_layers=3, hidden_size=8, intermediate_size=8, num_attention_heads=4, num_kv_heads=4,
              head_dim=2, vocab_size=11)  # fmt: skip


@st.composite
def model_instances(draw, lease, spec):
    """A copy of the model on any mesh in the lease, split in any legal way, its coordinates dealt out in any order."""
    mesh = draw(meshes(ClusterShape("drawn", lease.num_nodes, lease.devices_per_node, 1)))
    engine = draw(st.sampled_from(["megatron", "vllm"]))
    legal = degrees(mesh.num_devices).filter(lambda s: s.tp <= 4 and s.pp <= (1 if engine == "vllm" else 3))
    order = draw(st.one_of(st.just(()), st.permutations(range(mesh.num_devices)).map(tuple)))
    return ModelInstance("actor", engine, mesh, draw(legal), order)


def painted(layout, name):
    """[rank, *shape]: which elements each of 8 ranks holds."""
    held = np.zeros((8, *layout.shapes[name]), bool)
    for rank, region in layout.regions[name].items():
        held[(rank, *cut(region))] = True
    return held


@settings(max_examples=examples(150), deadline=None)
@given(st.data(), st.sampled_from(list(LEASES.values())), st.booleans())
def test_between_any_two_copies_of_a_model(data, lease, tied):
    """Overlapping, nested, disjoint and equal meshes: whole global tensors, sliced, are what arrives.

    Every element comes from one holder, on the target's node where any is there; nothing moves that is there already.
    """
    spec = model("actor", shape=replace(ODD, tied_embeddings=tied))
    source, target = (layout_of(data.draw(model_instances(lease, spec)), spec, lease) for _ in range(2))
    node = np.array([device.node for device in lease.devices()])
    plan = reshard(source, target, lease.devices())
    arrived = {name: np.zeros((8, *shape), int) for name, shape in target.shapes.items()}
    lacking = 0
    for piece in plan:
        have, place = painted(source, piece.parameter), cut(piece.region)
        assert have[(piece.source, *place)].all()
        arrived[piece.parameter][(piece.target, *place)] += 1
        if piece.source != piece.target:
            assert not have[(piece.target, *place)].any()
        if node[piece.source] != node[piece.target]:
            assert not have[(node == node[piece.target], *place)].any()
    for name in target.shapes:
        wanted = painted(target, name)
        assert (arrived[name] == wanted).all()
        lacking += int((wanted & ~painted(source, name)).sum())
    assert sum(piece.num_elements for piece in plan.moved) == lacking == num_lacking(source, target)


@pytest.mark.parametrize(
    ("train", "generate"),
    [
        (Strategy(dp=2, tp=4), Strategy(dp=4, tp=2)),
        (Strategy(dp=1, tp=4, pp=2), Strategy(dp=4, tp=2)),
        (Strategy(dp=1, tp=4, pp=2), Strategy(dp=8)),
        (Strategy(dp=2, tp=2, pp=2), Strategy(dp=2, tp=2, pp=2)),
        (Strategy(dp=2, tp=2, pp=2), Strategy(dp=4, tp=1, pp=2)),
        (Strategy(dp=1, tp=4, pp=2), Strategy(dp=2, tp=2, pp=2)),
    ],
    ids=str,
)
def test_at_most_the_volume_of_hybridflows_table_2(train, generate):
    """(tp - t_g p_g) / (t_g p_g t p) of M per device, M being what tensor parallelism can split (norms it cannot).

    The mean over devices: the stages of a pipeline are not equally large, for the embedding is on the first.
    """
    spec = model("actor", shape=replace(SMALL, num_kv_heads=4, tied_embeddings=False))
    lease = LEASES["two nodes"]
    held = ModelInstance("actor", "megatron", lease, train)
    made = ModelInstance("actor", "megatron", lease, generate)
    made = replace(made, device_order=overlapping_order(made, held, spec))
    moved = sum(
        piece.num_elements
        for piece in reshard(layout_of(held, spec, lease), layout_of(made, spec, lease)).moved
        if "norm" not in piece.parameter
    )
    whole = sum(p.num_elements for p in parameters(spec) if p.split_axis is not None)
    width, generated = train.tp * train.pp, generate.tp * generate.pp
    assert moved / 8 <= whole * (width - generated) / (generated * width)


@pytest.mark.parametrize("copies", [2, 4])
@pytest.mark.parametrize("tp", [1, 2])
def test_replicas_share_the_load_of_a_move_to_another_mesh(copies, tp):
    """What the most and the least loaded replica of a shard send differs by no more than the largest piece."""
    lease = DeviceMesh(0, 1, 0, 16)
    spec = model("actor")
    source = ModelInstance(
        "actor", "megatron", DeviceMesh(0, 1, 0, 8), Strategy(dp=copies, tp=tp, pp=8 // copies // tp)
    )
    target = ModelInstance("actor", "vllm", DeviceMesh(0, 1, 8, 8), Strategy(dp=8))
    sent, largest = Counter(), 0
    for piece in reshard(layout_of(source, spec, lease), layout_of(target, spec, lease)).moved:
        sent[piece.source] += piece.num_elements
        largest = max(largest, piece.num_elements)
    by_shard = defaultdict(list)
    for rank, at in enumerate(source.strategy.coordinates()):
        by_shard[at.pp, at.tp].append(sent[rank])
    assert all(max(loads) - min(loads) <= largest for loads in by_shard.values())
    assert all(min(loads) > 0 for loads in by_shard.values())
