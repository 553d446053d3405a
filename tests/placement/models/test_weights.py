"""Weights are a value: a model's parameters in named sets, each with a version of its own."""

import pickle
from dataclasses import replace

import pytest

from prefect_rlhf.placement.layout.layout import held_parts
from prefect_rlhf.placement.models import weights as of_models
from prefect_rlhf.placement.models.weights import Parameter, Part, further_parameters, parameters, weights_of
from tests.support.strategies import QWEN3, SMALL, model, ppo


@pytest.mark.parametrize(
    ("head", "shape", "parts"),
    [
        ("lm", SMALL, ["trunk"]),  # whose embedding is the head, too
        ("lm", QWEN3, ["trunk", "lm_head"]),
        ("scalar", QWEN3, ["trunk", "scalar_head"]),
        ("lm+scalar", QWEN3, ["trunk", "scalar_head", "lm_head"]),
    ],
)
def test_a_trunk_and_each_head_are_weights_of_their_own(head, shape, parts):
    """In the order of a forward pass, and together they are all parameters of the model."""
    found = weights_of(model("actor", head, shape), trained=True)
    assert [own.name for own in found] == [f"actor.{part}" for part in parts]
    assert [own.part for own in found] == parts
    assert sum((own.parameters for own in found), ()) == parameters(model("actor", head, shape))


def test_an_engine_that_generates_holds_all_weights_but_the_scalar_head():
    two = model("actor", "lm+scalar", QWEN3)
    assert held_parts(two, "vllm") == ("trunk", "lm_head")
    assert held_parts(two, "megatron") == ("trunk", "scalar_head", "lm_head")


def test_trained_weights_have_the_version_of_their_train_step_and_frozen_weights_keep_version_0():
    graph = ppo()
    assert [(own.name, own.trained, own.version(7)) for own in graph.all_weights()] == [
        ("actor.trunk", True, 7),
        ("critic.trunk", True, 7),
        ("critic.scalar_head", True, 7),
        ("ref.trunk", False, 0),
        ("reward.trunk", False, 0),
        ("reward.scalar_head", False, 0),
    ]


def test_weights_in_a_message_are_their_model_and_not_its_parameters():
    """A command has those of an instance, and goes to every rank; the ends count the parameters themselves."""
    small, large = (
        weights_of(model("actor", shape=replace(QWEN3, num_layers=layers)), trained=True) for layers in (2, 200)
    )
    assert len(pickle.dumps(large)) < len(pickle.dumps(small)) + 100
    assert pickle.loads(pickle.dumps(large)) == large


def test_a_further_model_part_has_its_own_weight_set(monkeypatch):
    def bonus(spec):
        return [Parameter("bonus.weight", (6, 4), 0)] if spec.role == "actor" else []

    monkeypatch.setitem(of_models.PARTS, "bonus", Part(bonus))
    assert [own.name for own in weights_of(model("actor"), trained=True)] == ["actor.trunk", "actor.bonus"]
    assert [own.name for own in weights_of(model("ref"), trained=False)] == ["ref.trunk"]
    assert further_parameters(model("actor"), learning=True) == (Parameter("bonus.weight", (6, 4), 0),)
    assert further_parameters(model("actor"), learning=False) == ()
    monkeypatch.setitem(of_models.PARTS, "bonus", Part(bonus, learns=lambda spec: False))
    assert [own.trained for own in weights_of(model("actor"), trained=True)] == [True, False]


def test_a_device_holds_the_largest_part_of_a_parameter():
    assert Parameter("w", (6, 4), 0).elements_of(tp=4) == 8
    assert Parameter("w", (6, 4)).elements_of(tp=4) == 24
    assert Parameter("w", (6, 4), 0, most_parts=2).elements_of(tp=4) == 12
