"""The fields of an adapter, and one line for each mistake in them."""

import pytest

from prefect_rlhf.blocks.adapter import NOT_OFFERED, Adapter
from prefect_rlhf.blocks.model import Model
from prefect_rlhf.errors.errors import InvalidInput
from prefect_rlhf.placement.models.adapter import AdapterSpec
from tests.support.strategies import GEMMA3, MIXTURE, QWEN3, SMALL

EVERY = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


@pytest.mark.parametrize("shape", [SMALL, QWEN3, GEMMA3])
def test_an_adapter_is_on_every_matrix_of_a_layer_unless_told(shape):
    """And on no norm."""
    assert Adapter(rank=8).to_spec("actor", shape) == AdapterSpec(8, 32.0, EVERY)


@pytest.mark.parametrize(
    ("names", "matrices"),
    [
        ("all-linear", EVERY),
        (["all-linear"], EVERY),
        (["q_proj", "all-linear"], EVERY),
        (["v_proj", "q_proj"], ("q_proj", "v_proj")),
        ("down_proj", ("down_proj",)),
        (["self_attn.o_proj", "mlp.up_proj", "up_proj"], ("o_proj", "up_proj")),
    ],
)
def test_matrices_have_pefts_names_in_any_order(names, matrices):
    """A name, several, or the last parts of one."""
    adapter = Adapter(rank=4, alpha=2.0, target_modules=names, rslora=True)
    assert adapter.to_spec("actor", SMALL) == AdapterSpec(4, 2.0, matrices, rslora=True)


@pytest.mark.parametrize(
    ("fields", "line"),
    [
        ({"rank": 0}, "Adapter.rank: got 0, expected at least 1"),
        ({"rank": 1000}, "Adapter.rank: got 1000, expected at most 512"),
        ({"rank": True}, "Adapter.rank: got True"),
        ({"alpha": float("inf")}, "Adapter.alpha: got inf, expected a finite number"),
        ({"alpha": 0.0}, "Adapter.alpha: got 0.0, expected more than 0"),
        ({"target_modules": []}, "Adapter.target_modules: got [], expected all-linear, or names such as"),
        (
            {"target_modules": ["q_proj", "lm_head"]},
            "matrices of a layer: with an adapter, embedding and head stay frozen",
        ),
        (
            {"target_modules": ["model.embed_tokens"]},
            "matrices of a layer: with an adapter, embedding and head stay frozen",
        ),
        *(({name: True}, f"Adapter.{name}: got True, expected no value: ") for name in NOT_OFFERED),
    ],
)
def test_a_wrong_field_is_refused_in_one_line(fields, line):
    with pytest.raises(InvalidInput) as refused:
        Adapter(**fields)
    assert line in str(refused.value) and "\n" not in str(refused.value)


def test_a_misspelt_field_gets_the_fields_of_an_adapter():
    with pytest.raises(InvalidInput, match="Model.adapter.rnk: unknown key"):
        Model(path="m", adapter={"rnk": 3})


@pytest.mark.parametrize(
    ("adapter", "shape", "line"),
    [
        (Adapter(rank=129), SMALL, "actor.adapter.rank: got 129, expected at most 64: k_proj is 64 x 128"),
        (Adapter(rank=65, target_modules="k_proj"), SMALL, "actor.adapter.rank: got 65, expected at most 64"),
        (
            Adapter(target_modules="c_attn"),
            SMALL,
            "actor.adapter.target_modules: got 'c_attn', expected all-linear, or",
        ),
        (Adapter(target_modules="proj"), SMALL, "actor.adapter.target_modules: got 'proj'"),
        (Adapter(target_modules="mlp.q_proj"), SMALL, "actor.adapter.target_modules: got 'mlp.q_proj'"),
        (Adapter(), MIXTURE, "actor.adapter: got 'rank 32', expected no adapter: a mixture of experts cannot"),
    ],
)
def test_an_adapter_that_does_not_suit_the_model_is_refused_in_one_line(adapter, shape, line):
    with pytest.raises(InvalidInput) as refused:
        adapter.to_spec("actor", shape)
    assert str(refused.value).startswith(line)


def test_the_rank_may_equal_the_smallest_matrixs():
    assert Adapter(rank=64).to_spec("actor", SMALL).rank == 64
