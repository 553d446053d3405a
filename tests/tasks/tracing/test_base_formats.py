"""A frozen role on a base in four bits has that format, whoever states it."""

from dataclasses import replace

import pytest

from prefect_rlhf.errors.errors import InvalidInput
from prefect_rlhf.flows.algorithm.rlhf_flow import find_flow
from prefect_rlhf.flows.forms.plan_options import plan_options
from prefect_rlhf.flows.planning.what_if import read_question
from prefect_rlhf.placement.layout.layout import wrong_blocks, wrong_tp
from prefect_rlhf.placement.models.adapter import AdapterSpec
from prefect_rlhf.placement.models.weights import parts
from prefect_rlhf.placement.plans.check import violations
from tests.support.strategies import model, on

QUESTION = {
    "models": {"actor": "llama-7b", "critic": "llama-7b"},
    "cluster": "1x1:h100",
    "prompt_length": "512",
    "response_length": "512",
    "batch_size": 16,
}
ADAPTED = {"adapter": {"rank": 16}, "base_dtype": "nf4"}


def asked(algorithm="grpo", **parameters):
    options = plan_options(
        QUESTION
        | {"algorithm": algorithm, "parameters": parameters}
        | ({"models": {"actor": "llama-7b"}} if algorithm == "grpo" else {})
    )
    return read_question(find_flow(options.algorithm), options)


def test_the_reference_of_an_actor_is_its_base_in_four_bits():
    """It states no format itself, and both name the same weights, which are counted once."""
    graph = asked(actor=ADAPTED).graph
    assert {model.role: model.base_dtype for model in graph.models}["ref"] == "nf4"
    (trunk,) = (own for own in graph.weights("ref") if own.part == "trunk")
    assert trunk in graph.weights("actor")
    assert sum(one.dtype == "uint8" for one in trunk.parameters) == 2 * 7 * 32


def test_roles_with_adapters_on_a_base_state_the_same_format():
    with pytest.raises(InvalidInput, match=r"critic\.base_dtype: got None, expected nf4, as for actor, which has the"):
        asked("ppo", actor=ADAPTED, critic={"adapter": {"rank": 16}})


def test_an_engine_that_does_not_dequantise_is_refused_by_name():
    graph = asked(actor=ADAPTED).graph
    call = graph.call("actor_generate")
    (found,) = violations(call, on("n0:0", "vllm"), graph, "cuda")
    assert str(found).startswith("plan.calls.actor_generate.engine: got 'vllm', expected megatron for actor (llama-7b)")
    assert "its base is in four bits (base_dtype nf4)" in str(found)
    assert not list(violations(call, on("n0:0", "megatron"), graph, "cuda"))


def test_a_cut_inside_of_a_block_is_refused():
    """Of a matrix that tp splits by inputs; what it splits by outputs has whole rows."""
    wide = model("actor")
    shape = replace(
        wide.shape, hidden_size=256, num_attention_heads=8, num_kv_heads=8, head_dim=32, intermediate_size=448
    )
    four = replace(wide, shape=shape, adapter=AdapterSpec(4, 4.0, ("q_proj",)), base_dtype="nf4")
    assert wrong_tp(four, "megatron", 1) == ""
    assert wrong_tp(four, "megatron", 2) == "a tp with whole blocks of 64 of the 448 columns of down_proj"
    assert wrong_tp(replace(four, base_dtype=None), "megatron", 2) == ""
    narrow = replace(four, shape=replace(shape, hidden_size=96))
    assert wrong_blocks(narrow, 1) == "a tp with whole blocks of 64 of the 96 columns of q_proj"
    assert [one.name for one in parts(four)["trunk"] if "layers.0.mlp.down_proj" in one.name] == [
        f"model.layers.0.mlp.down_proj.weight{end}" for end in ("", ".absmax", ".nested_absmax")
    ]
