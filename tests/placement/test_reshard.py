"""Reshard plans against whole numpy tensors."""

from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from prefect_rlhf.placement.errors import InvalidInput
from prefect_rlhf.placement.layout import Layout, megatron_layout, vllm_layout
from prefect_rlhf.placement.mesh import Device
from prefect_rlhf.placement.reshard import reshard
from prefect_rlhf.placement.strategy import Strategy
from tests.strategies import SMALL, model

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


def test_the_same_layout_moves_nothing():
    layout = megatron_layout(model("actor"), Strategy(dp=2, tp=2), (0, 1, 2, 3))
    assert reshard(layout, layout).moved == ()


def test_training_to_generation_on_the_same_ranks_and_tp_moves_nothing():
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


def test_layouts_of_different_models_are_refused():
    with pytest.raises(InvalidInput, match="the same parameters"):
        reshard(Layout({"a": (6,)}, {}), Layout({"a": (7,)}, {}))
