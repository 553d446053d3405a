"""The card in the folder of a trained model."""

from dataclasses import replace

import pytest
from huggingface_hub import ModelCard

from prefect_rlhf.placement.models.adapter import AdapterSpec
from prefect_rlhf.placement.models.model import ModelSpec
from prefect_rlhf.tasks.reporting.model_card import model_card
from tests.flows.test_algorithms import SHAPE

pytestmark = pytest.mark.quick

ACTOR = ModelSpec("actor", "/home/anna/models/smollm2", "lm", SHAPE)


@pytest.mark.parametrize(
    ("head", "task", "opens_with"),
    [
        ("lm", "text-generation", "pipeline("),
        ("lm+scalar", "text-generation", "pipeline("),
        ("scalar", "text-classification", "AutoModelForSequenceClassification.from_pretrained("),
    ],
)
def test_the_card_tells_the_hub_the_models_use_and_training(head, task, opens_with):
    card = ModelCard(model_card(replace(ACTOR, head=head), "my: algorithm", 10, "amber-fox"))
    found = card.data.to_dict()
    assert (found["library_name"], found["pipeline_tag"]) == ("transformers", task)
    assert found["tags"] == ["prefect-rlhf", "my: algorithm"]
    assert opens_with in card.text and "in 10 steps" in card.text and "# actor of amber-fox" in card.text


@pytest.mark.parametrize(
    ("head", "opens_with"),
    [("lm", "AutoPeftModelForCausalLM.from"), ("scalar", "AutoPeftModelForSequenceClassification.from")],
)
def test_the_card_of_an_adapter_is_for_peft(head, opens_with):
    adapted = replace(ACTOR, head=head, adapter=AdapterSpec(4, 8.0, ("q_proj",)))
    card = ModelCard(model_card(adapted, "grpo", 10, "amber-fox"))
    assert card.data.to_dict()["library_name"] == "peft"
    assert opens_with in card.text and "trained this adapter from `smollm2`" in card.text


def test_a_card_names_the_base_model_without_the_folders_above_it():
    """They may name a person."""
    text = model_card(ACTOR, "grpo", 10, "amber-fox")
    assert "from `smollm2`" in text and "anna" not in text


@pytest.mark.parametrize(
    "path", ["hf://acme/tiny@main", f"/home/anna/hub/models--acme--tiny/snapshots/{'7ae557604a' * 4}"]
)
def test_a_card_names_a_base_model_by_its_hub_name(path):
    """So the Hub shows the model below its base."""
    card = ModelCard(model_card(replace(ACTOR, path=path), "grpo", 10, "amber-fox"))
    assert card.data.base_model == "acme/tiny" and "from `acme/tiny` in" in card.text and "anna" not in card.text
    assert "add `license` to" in card.text and "`base_model`" not in card.text


def test_a_card_leaves_out_a_base_name_that_the_hub_would_refuse():
    """A folder's path is no name on the Hub: an upload with it ends in an error."""
    assert "base_model" not in ModelCard(model_card(ACTOR, "grpo", 10, "amber-fox")).data.to_dict()
