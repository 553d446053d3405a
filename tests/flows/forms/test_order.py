"""The form of a deployment: a person finds models and data first, and sees what a run needs."""

import inspect
from typing import Annotated

import pytest
from prefect.utilities.callables import parameter_schema
from pydantic import Field

from prefect_rlhf import algorithms
from prefect_rlhf.blocks.dataset import Prompts
from prefect_rlhf.blocks.model import Model
from prefect_rlhf.flows.forms.form_flow import form_entry, own_parameters
from prefect_rlhf.flows.forms.options import RunOptions
from prefect_rlhf.flows.forms.order import in_order
from prefect_rlhf.flows.forms.reward import Reward
from prefect_rlhf.tasks.rl.settings.online import GRPO

pytestmark = pytest.mark.quick

Judge = Annotated[Model, Field(description="The model that reads the answers.")]
OWN = {  # an algorithm's parameters in its form, without those of every run; * marks what a run needs
    "ppo": "actor* critic ref* reward prompts* held_out* algo staleness play",
    "grpo": "actor* reward ref prompts* held_out* algo staleness play",
    "remax": "actor* reward ref prompts* held_out* algo staleness play",
    "safe_rlhf": "actor* critic* cost_critic* ref* reward* cost* prompts* held_out* pretrain* algo staleness",
    "dpo": "actor* ref pairs* held_out* algo",
    "kto": "actor* ref* answers* held_out* algo",
    "sft": "actor* chats* held_out* algo",
    "reward": "reward* pairs* held_out* algo",
}


def shown(name):
    """Return the form's schema of an algorithm, and its fields in the order that Prefect's UI shows."""
    schema = parameter_schema(getattr(algorithms, name))
    return schema, sorted(schema.properties, key=lambda field: schema.properties[field]["position"])


@pytest.mark.parametrize("name", OWN)
def test_a_form_has_models_then_data_then_settings_then_the_options_of_every_run(name):
    schema, fields = shown(name)
    marked = [field + "*" * (field in schema.required) for field in fields]
    assert marked == [*OWN[name].split(), "evaluation", *RunOptions.model_fields]


def test_every_shipped_algorithm_has_its_form_here():
    assert set(algorithms.__all__) - {"find_flow"} == set(OWN)


@pytest.mark.parametrize("name", OWN)
def test_every_field_of_a_form_has_a_line_about_it(name):
    """Its own, or that of the group of settings behind it."""
    schema, fields = shown(name)
    for field in fields:
        one = schema.properties[field]
        group = schema.definitions.get(one.get("$ref", "").rpartition("/")[2], {})
        assert one.get("description") or group.get("description"), field


@pytest.mark.parametrize("group", ["Model", "Prompts"])
def test_a_group_that_a_saved_block_may_fill_says_when_its_path_is_needed(group):
    """A required path would refuse a saved block alone."""
    schema, _ = shown("grpo")
    fields = schema.definitions[group]["properties"]
    assert list(fields)[0] == "path" and "path" not in schema.definitions[group].get("required", [])
    assert fields["path"]["description"].startswith("Needed unless you name a saved block. ")
    assert fields["saved"]["title"] == "Saved block"


def test_an_authors_parameters_are_put_in_the_same_order_and_described_by_their_types():
    def body(share: float, questions: Prompts, algo: GRPO, scorer: Reward, judge: Judge) -> None:
        """An algorithm."""

    own = own_parameters(body)
    assert [one.name for one in in_order(own)] == ["scorer", "judge", "questions", "algo", "share", "evaluation"]
    entry = form_entry(body, RunOptions, lambda _: None, own)
    assert list(inspect.signature(entry).parameters)[:5] == ["scorer", "judge", "questions", "algo", "share"]
    assert parameter_schema(entry).properties["judge"]["description"] == "The model that reads the answers."
