"""Layouts: who holds which part of which parameter, under Hugging Face names."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from prefect_rlhf.errors.errors import InvalidInput
from prefect_rlhf.placement.devices.mesh import DeviceMesh
from prefect_rlhf.placement.devices.strategy import Strategy
from prefect_rlhf.placement.layout.layout import layout_of, stages
from prefect_rlhf.placement.models.model import QUERY_BIASES
from prefect_rlhf.placement.models.weights import num_parameters
from prefect_rlhf.placement.plan import ModelInstance
from tests.support.layouts import megatron_layout, vllm_layout
from tests.support.strategies import GEMMA3, MIXTURE, QWEN2, QWEN3, SMALL, SMOLLM2, model

pytestmark = pytest.mark.quick

UNTIED = replace(SMALL, tied_embeddings=False)


def test_smollm2_has_as_many_parameters_as_its_checkpoint():
    assert num_parameters(model("actor", shape=SMOLLM2)) == 134_515_008


def test_tp_splits_heads_columns_and_vocabulary_and_repeats_norms():
    held = megatron_layout(model("actor", shape=UNTIED), Strategy(tp=2), (0, 1)).of_rank(1)
    layer = "model.layers.3."
    assert held["model.embed_tokens.weight"] == ((256, 512), (0, 128))
    assert held["lm_head.weight"] == ((256, 512), (0, 128))
    assert held[layer + "self_attn.q_proj.weight"] == ((64, 128), (0, 128))
    assert held[layer + "self_attn.k_proj.weight"] == ((32, 64), (0, 128))
    assert held[layer + "self_attn.v_proj.weight"] == ((32, 64), (0, 128))
    assert held[layer + "self_attn.o_proj.weight"] == ((0, 128), (64, 128))
    assert held[layer + "mlp.gate_proj.weight"] == held[layer + "mlp.up_proj.weight"] == ((128, 256), (0, 128))
    assert held[layer + "mlp.down_proj.weight"] == ((0, 128), (128, 256))
    assert held[layer + "input_layernorm.weight"] == ((0, 128),)
    assert held["model.norm.weight"] == ((0, 128),)


def test_neighbours_hold_copies_of_key_value_heads_that_are_fewer_than_tp():
    """Of two heads each of four ranks has one; biases follow their matrices."""
    shape = replace(SMALL, biases=QUERY_BIASES)
    for make in (megatron_layout, vllm_layout):
        layout = make(model("actor", shape=shape), Strategy(tp=4), (0, 1, 2, 3))
        heads = [(0, 32), (0, 32), (32, 64), (32, 64)]
        for name in ("k_proj", "v_proj"):
            stem = f"model.layers.3.self_attn.{name}"
            assert layout.regions[f"{stem}.weight"] == {rank: (head, (0, 128)) for rank, head in enumerate(heads)}
            assert layout.regions[f"{stem}.bias"] == {rank: (head,) for rank, head in enumerate(heads)}
        assert layout.regions["model.layers.3.self_attn.q_proj.bias"][3] == ((96, 128),)


def test_pp_gives_each_stage_its_layers_and_the_ends_their_own():
    layout = megatron_layout(model("actor", shape=UNTIED), Strategy(pp=2), (0, 1))
    first, last = (set(layout.of_rank(rank)) for rank in (0, 1))
    assert {f"model.layers.{n}.mlp.up_proj.weight" in first for n in (0, 1)} == {True}
    assert {f"model.layers.{n}.mlp.up_proj.weight" in last for n in (2, 3)} == {True}
    assert not first & last
    assert "model.embed_tokens.weight" in first
    assert {"model.norm.weight", "lm_head.weight"} <= last


@pytest.mark.parametrize(("head", "copies"), [("lm", {0, 1}), ("scalar", {0}), ("lm+scalar", {0, 1})])
def test_the_last_stage_has_the_tied_embedding_only_for_a_language_models_output(head, copies):
    layout = megatron_layout(model("actor", head), Strategy(pp=2), (0, 1))
    assert set(layout.regions["model.embed_tokens.weight"]) == copies
    assert ("score.weight" in layout.shapes) == ("scalar" in head)
    assert "lm_head.weight" not in layout.shapes


@given(
    tp=st.sampled_from([1, 2, 4]),
    dp=st.integers(1, 3),
    pp=st.sampled_from([1, 2, 3, 4]),
    head=st.sampled_from(["lm", "scalar", "lm+scalar"]),
    shape=st.sampled_from(
        [
            SMALL,
            UNTIED,
            replace(SMALL, num_layers=5, vocab_size=511),
            replace(SMALL, num_kv_heads=1),
            QWEN2,
            QWEN3,
            GEMMA3,
            MIXTURE,
        ]
    ),
)
def test_every_replica_holds_every_element_once(tp, dp, pp, head, shape):
    """Painting what the ranks of one replica hold covers each parameter; split ones exactly once, but for the copies of
    key-value heads that are fewer than tp."""
    strategy = Strategy(dp, tp, pp)
    ranks = tuple(range(100, 100 + strategy.num_devices))
    layout = megatron_layout(model("actor", head, shape), strategy, ranks)
    for name, size in layout.shapes.items():
        for replica in range(dp):
            painted = np.zeros(size, dtype=int)
            for index, rank in enumerate(ranks):
                if index // tp % dp == replica and rank in layout.regions[name]:
                    painted[tuple(slice(*span) for span in layout.regions[name][rank])] += 1
            is_whole = len(size) == 1 and not name.endswith("proj.bias") or name.endswith("mlp.gate.weight")
            copies = tp if is_whole or name == "score.weight" else 1
            if "k_proj" in name or "v_proj" in name:
                copies = max(1, tp // shape.num_kv_heads)
            if name == "model.embed_tokens.weight" and pp > 1 and "lm" in head and shape.tied_embeddings:
                copies = 2
            assert (painted == copies).all(), name


def test_neighbouring_replicas_share_experts_out_and_tp_splits_each():
    """dp 4, tp 2, ep 2 of eight experts of 64 columns: rank 3 is the second of tp, in the second replica."""
    layout = megatron_layout(model("actor", shape=MIXTURE), Strategy(dp=4, tp=2, ep=2), tuple(range(8)))
    experts = "model.layers.0.mlp.experts."
    held = layout.of_rank(3)
    assert held[f"{experts}gate_proj.weight"] == held[f"{experts}up_proj.weight"] == ((4, 8), (32, 64), (0, 128))
    assert held[f"{experts}down_proj.weight"] == ((4, 8), (0, 128), (32, 64))
    assert held["model.layers.0.mlp.gate.weight"] == ((0, 8), (0, 128))
    assert layout.of_rank(7) == held and layout.of_rank(1) != held


def test_with_vllm_each_device_has_whole_experts():
    layout = vllm_layout(model("actor", shape=MIXTURE), Strategy(dp=2, tp=2, ep=2), (0, 1, 2, 3))
    gates = layout.regions["model.layers.0.mlp.experts.gate_proj.weight"]
    assert gates == {rank: ((2 * rank, 2 * rank + 2), (0, 64), (0, 128)) for rank in range(4)}


@pytest.mark.parametrize(("layers", "pp", "sizes"), [(30, 4, [8, 8, 7, 7]), (5, 2, [3, 2]), (4, 4, [1] * 4)])
def test_stages_are_as_even_as_possible_and_the_first_get_the_extra_layers(layers, pp, sizes):
    made = stages(layers, pp)
    assert [len(stage) for stage in made] == sizes
    assert [layer for stage in made for layer in stage] == list(range(layers))


def test_megatron_pads_the_vocabulary_when_tp_does_not_divide_it():
    """Padding belongs to no region: the checkpoint has no such rows."""
    layout = megatron_layout(model("actor", shape=replace(UNTIED, vocab_size=511)), Strategy(tp=2), (0, 1))
    for name in ("model.embed_tokens.weight", "lm_head.weight"):
        assert layout.regions[name] == {0: ((0, 256), (0, 128)), 1: ((256, 511), (0, 128))}


def test_vllm_pads_the_vocabulary_on_the_last_rank():
    layout = vllm_layout(model("actor", shape=replace(SMALL, vocab_size=500)), Strategy(tp=2), (0, 1))
    regions = layout.regions["model.embed_tokens.weight"]
    assert regions == {0: ((0, 256), (0, 128)), 1: ((256, 500), (0, 128))}


def test_a_rank_with_only_padding_holds_no_vocabulary():
    shape = replace(SMALL, vocab_size=60, num_kv_heads=4)
    layout = vllm_layout(model("actor", shape=shape), Strategy(tp=4), (0, 1, 2, 3))
    assert layout.regions["model.embed_tokens.weight"][3] == ((48, 60), (0, 128))
    shape = replace(shape, vocab_size=40)
    assert (
        3
        not in vllm_layout(model("actor", shape=shape), Strategy(tp=4), (0, 1, 2, 3)).regions[
            "model.embed_tokens.weight"
        ]
    )


def test_ranks_are_positions_in_the_leased_mesh():
    instance = ModelInstance("actor", "megatron", DeviceMesh(1, 1, 2, 2), Strategy(dp=2))
    layout = layout_of(instance, model("actor"), DeviceMesh(1, 1, 0, 4))
    assert set(layout.regions["model.norm.weight"]) == {2, 3}


@pytest.mark.parametrize(
    ("make", "shape", "strategy", "says"),
    [
        (
            megatron_layout,
            {"num_attention_heads": 12, "num_kv_heads": 3},
            Strategy(tp=2),
            "tp: got 2, expected a divisor or a multiple of the 3 key-value heads",
        ),
        (megatron_layout, {"num_layers": 3}, Strategy(pp=4), "pp: got 4, expected at most 3, the layers of actor"),
        (vllm_layout, {}, Strategy(pp=2), "pp: got 2, expected 1"),
    ],
)
def test_what_does_not_divide_is_refused(make, shape, strategy, says):
    with pytest.raises(InvalidInput, match=says):
        make(model("actor", shape=replace(SMALL, **shape)), strategy, tuple(range(strategy.num_devices)))
