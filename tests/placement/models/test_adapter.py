"""An adapter is a set of weights beside the frozen weights of its model."""

from dataclasses import replace

import pytest

from prefect_rlhf.errors.errors import GraphError
from prefect_rlhf.placement.devices.strategy import Strategy
from prefect_rlhf.placement.layout.layout import engine_layout
from prefect_rlhf.placement.models.adapter import AdapterSpec
from prefect_rlhf.placement.models.weights import further_parameters, named_weights, num_parameters, parts, weights_of
from tests.support.strategies import MIXTURE, QWEN3, SMALL, model

ALL = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


def adapted(role="actor", head="lm", shape=SMALL, matrices=ALL, **more):
    return replace(model(role, head, shape), adapter=AdapterSpec(8, 16.0, matrices, **more))


def test_each_adapted_matrix_has_an_a_and_a_b_under_pefts_names():
    spec = adapted(matrices=("down_proj", "q_proj"))
    names = [parameter.name for parameter in parts(spec)["adapter"]]
    layer = [f"{matrix}.lora_{half}.weight" for matrix in ("self_attn.q_proj", "mlp.down_proj") for half in "AB"]
    assert names == [f"model.layers.{number}.{name}" for number in range(4) for name in layer]
    shapes = {parameter.name.split(".", 4)[4]: parameter.shape for parameter in parts(spec)["adapter"]}
    assert shapes == {
        "q_proj.lora_A.weight": (8, 128),
        "q_proj.lora_B.weight": (128, 8),
        "down_proj.lora_A.weight": (8, 256),
        "down_proj.lora_B.weight": (128, 8),
    }
    assert num_parameters(spec) == num_parameters(model("actor")) + 4 * 8 * (128 + 128 + 256 + 128)


@pytest.mark.parametrize("shape", [SMALL, QWEN3])
@pytest.mark.parametrize("engine", ["megatron", "vllm"])
def test_a_and_b_are_split_as_the_matrix_that_they_adapt(shape, engine):
    """By outputs as B, by inputs as A, and with one key-value head on two ranks both hold a copy."""
    spec = adapted(shape=shape)
    for rank, regions in ((rank, engine_layout(spec, engine, Strategy(tp=2), (0, 1)).of_rank(rank)) for rank in (0, 1)):
        for name, region in regions.items():
            matrix, _, half = name.removesuffix(".weight").rpartition(".")
            if half in ("lora_A", "lora_B"):
                outputs, inputs = regions[f"{matrix}.weight"]
                assert region == (((0, 8), inputs) if half == "lora_A" else (outputs, (0, 8))), (rank, name)


def test_an_adapter_is_on_the_stage_of_its_layer():
    regions = engine_layout(adapted(), "megatron", Strategy(pp=2), (0, 1)).of_rank(1)
    assert {int(name.split(".")[2]) for name in regions if "lora" in name} == {2, 3}


def test_only_an_adapter_and_a_scalar_head_are_trained():
    found = weights_of(adapted(head="lm+scalar", shape=QWEN3), trained=True)
    assert [(own.name, own.trained) for own in found] == [
        ("actor.trunk", False),
        ("actor.scalar_head", True),
        ("actor.lm_head", False),
        ("actor.adapter", True),
    ]
    assert further_parameters(adapted(), learning=True) == (), "sizes have an adapter in closed form"


def test_a_reference_on_the_same_folder_names_the_frozen_weights_of_an_adapted_actor():
    """And another role with an adapter does too; adapters are shared only if they are frozen and of one folder."""
    one, other = ({"path": f"/adapters/{name}"} for name in ("one", "other"))
    models = [adapted(), model("ref"), adapted("sft", **one), adapted("judge", **one), adapted("teacher", **other)]
    models = tuple(replace(each, content="/models/base") for each in models)
    found = named_weights(models, frozenset({"actor"}))
    assert {role: [own.name for own in sets] for role, sets in found.items()} == {
        "actor": ["actor.trunk", "actor.adapter"],
        "ref": ["actor.trunk"],
        "sft": ["actor.trunk", "sft.adapter"],
        "judge": ["actor.trunk", "sft.adapter"],
        "teacher": ["actor.trunk", "teacher.adapter"],
    }


def test_the_product_counts_alpha_over_the_rank_or_over_its_root():
    assert AdapterSpec(4, 8.0, ALL).scale == 2
    assert AdapterSpec(4, 8.0, ALL, rslora=True).scale == 4


def test_a_mixture_of_experts_has_no_adapter():
    with pytest.raises(GraphError, match="actor is a mixture of experts, which can have no adapter yet"):
        parts(adapted(shape=MIXTURE))
