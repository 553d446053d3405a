"""A person's code gets tokenizers as folders of its machine, also of models on the Hub."""

from pathlib import Path

import pytest
from transformers import AutoTokenizer

from prefect_rlhf.engines.rank.inputs import tokenizers_here
from prefect_rlhf.engines.sampling.chats.tokenizers import tokenizer_of
from prefect_rlhf.placement.rows.tokenizers import Tokenizers
from tests.support.hub_stand_in import in_this_process, stand_in
from tests.support.tiny import make_model


@pytest.fixture
def hub(tmp_path):
    with stand_in() as hub, in_this_process(hub, tmp_path / "hf"):
        yield hub


@pytest.fixture
def model(hub, tmp_path):
    """The path of a model at a commit."""
    make_model(tmp_path / "model")
    return f"hf://acme/tiny@{hub.add('acme/tiny', tmp_path / 'model')}"


def test_a_computation_gets_folders_that_transformers_opens_without_the_weights(hub, model):
    here = tokenizers_here(Tokenizers("actor", {"actor": model, "judge": "models/judge"})).folders
    assert here["judge"] == "models/judge"
    assert Path(here["actor"]).is_dir()
    assert AutoTokenizer.from_pretrained(here["actor"])("what is it")["input_ids"]
    assert hub.asked_for("GET", "safetensors") == []


def test_a_play_reads_the_tokenizer_of_a_model_on_the_hub(model, tmp_path):
    words = "what is it"
    assert tokenizer_of(model)(words)["input_ids"] == tokenizer_of(str(tmp_path / "model"))(words)["input_ids"]
