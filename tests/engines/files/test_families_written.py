"""Folders of every family that runs, through the engine and back: the same model, the same config.json."""

import json
from dataclasses import replace
from pathlib import Path

import family_cases
import megatron_cases as cases
import pytest
import torch
from megatron_cases import Case
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSequenceClassification

from prefect_rlhf.engines.files.huggingface import _config_of, write_folder
from prefect_rlhf.engines.files.model_config import runnable_shape
from prefect_rlhf.placement.models.known_models import KNOWN_SHAPES
from prefect_rlhf.placement.models.model import ModelSpec
from prefect_rlhf.placement.models.weights import parameters

OF_VERSION_4 = {"rope_theta", "rope_scaling", "rope_local_base_freq", "sliding_window_pattern", "torch_dtype"}
"""Keys that transformers 4 reads, where version 5 writes `rope_parameters` and `dtype`."""


def rewritten(case: Case, target: Path) -> dict:
    """Write what an engine holds as a folder; return its config.json."""
    tensors = ((name, shard.view.reshape(shard.shape)) for name, shard in case.build(0).weights().items())
    write_folder(target, case.spec(), tensors, case.folder)
    return json.loads((target / "config.json").read_text())


@pytest.mark.parametrize(
    "name", ["llama-7b", "llama-3.1-8b", "mistral-7b", "qwen2.5-7b", "qwen3-8b", "gemma-3-270m", "gemma-3-1b"]
)
def test_a_shape_without_a_folder_is_written_as_it_is_read(tmp_path, name):
    """As for a profile of a model by name; transformers takes the same from it."""
    shape = replace(KNOWN_SHAPES[name], num_layers=7)
    if shape.window is not None:
        shape = replace(shape, window=replace(shape.window, layers=(0, 1, 2, 3, 4, 6)))
    config = _config_of(ModelSpec("actor", str(tmp_path / "none"), "lm", shape), tmp_path)
    assert runnable_shape(config, "config.json") == shape
    loaded = AutoConfig.for_model(**config)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(loaded)
    expected = {p.name: p.shape for p in parameters(ModelSpec("actor", "", "lm", shape))}
    assert {name: tuple(value.shape) for name, value in model.named_parameters()} == expected


@pytest.mark.parametrize("name", family_cases.OPTIONS)
def test_a_written_folder_is_the_model_with_its_own_config(tmp_path, name):
    """Plain transformers finds all weights, gives equal logits, and config.json is the very one but for older keys."""
    source = family_cases.make_family(tmp_path / "source", name, 3)
    config = rewritten(Case(source), tmp_path / "written")
    before = json.loads((tmp_path / "source" / "config.json").read_text())
    assert {key: value for key, value in config.items() if key not in OF_VERSION_4} == before
    found, said = AutoModelForCausalLM.from_pretrained(tmp_path / "written", dtype="auto", output_loading_info=True)
    assert not any(said.values())
    tokens = cases.make_rows(4)[0].tokens_BS
    assert torch.equal(found(tokens).logits, family_cases.oracle(source)(tokens).logits)


@pytest.mark.parametrize("name", ["qwen2", "qwen3", "gemma3_text"])
def test_training_changes_head_and_format_of_a_config_alone(tmp_path, name):
    """A critic made of a language model, in bfloat16: transformers loads it as a classifier of one label."""
    source = family_cases.make_family(tmp_path / "source", name, 3)
    config = rewritten(Case(source, head="scalar", dtype="bfloat16", new_head=True), tmp_path / "written")
    before = json.loads((tmp_path / "source" / "config.json").read_text())
    changed = {key for key in before.keys() | config.keys() if before.get(key) != config.get(key)}
    assert changed - OF_VERSION_4 == {"architectures", "dtype", "id2label", "label2id"}
    found, said = AutoModelForSequenceClassification.from_pretrained(
        tmp_path / "written", dtype="auto", output_loading_info=True
    )
    assert not any(said.values())
    assert found.config.num_labels == 1 and found.dtype == torch.bfloat16
    expected = family_cases.oracle(source).state_dict()
    for key, value in found.state_dict().items():
        assert key == "score.weight" or torch.equal(value, expected[key].bfloat16()), key
