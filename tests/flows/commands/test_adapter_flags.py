"""An adapter on the command line and in the form of a deployment."""

import inspect

import pytest

from prefect_rlhf.blocks.model import Model
from prefect_rlhf.errors.errors import InvalidInput
from prefect_rlhf.flows.commands.flags import read_parameters
from prefect_rlhf.flows.forms.check import checked_value
from prefect_rlhf.flows.grpo import grpo

ACTOR = inspect.Parameter("actor", inspect.Parameter.KEYWORD_ONLY, annotation=Model)


def actor(*assignments):
    return checked_value(ACTOR, read_parameters(None, ["actor.path=models/m", *assignments])["actor"])


def test_fields_of_an_adapter_are_parameters_of_a_command():
    given = actor("actor.adapter.rank=16", "actor.adapter.target_modules=[q_proj, v_proj]", "actor.adapter.alpha=8")
    assert (given.adapter.rank, given.adapter.alpha) == (16, 8.0)
    assert given.adapter.target_modules == ("q_proj", "v_proj")
    assert actor("actor.adapter.target_modules=all-linear").adapter.rank == 32


def test_a_wrong_field_of_an_adapter_is_named_with_its_path():
    with pytest.raises(InvalidInput, match="^actor.adapter.rank: got 'many', expected a whole number"):
        actor("actor.adapter.rank=many")
    with pytest.raises(InvalidInput, match="^actor.adapter.bias: got 'all', expected no value: biases are frozen"):
        actor("actor.adapter.bias=all")


def test_the_form_of_a_deployment_has_the_fields_of_an_adapter():
    definitions = grpo.parameters.definitions
    assert definitions["Adapter"]["properties"].keys() == {"rank", "alpha", "target_modules", "rslora", "path"}
    assert {"$ref": "#/definitions/Adapter"} in definitions["Model"]["properties"]["adapter"]["anyOf"]
