"""Any dense config.json is read as transformers builds it, and what our engines do not run of it is said."""

from __future__ import annotations

import json

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from prefect_rlhf.engines.files.huggingface import read_model_spec, read_shape
from prefect_rlhf.placement.errors import InvalidInput
from prefect_rlhf.placement.layout.parameters import parameters
from prefect_rlhf.placement.model import ModelSpec

SIZES = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 128,
}
FAMILIES = {
    "llama": {"attention_bias": True, "mlp_bias": True},
    "mistral": {"sliding_window": None},
    "qwen2": {"use_sliding_window": False, "sliding_window": 4096},
    "qwen3": {"head_dim": 32},
    "gemma": {"head_dim": 32},
    "gemma2": {"head_dim": 32},
    "gemma3_text": {"head_dim": 32},
}


def written(folder, content):
    (folder / "config.json").write_text(json.dumps(content))
    return folder


@pytest.mark.parametrize("kind", FAMILIES)
def test_the_parameters_are_those_that_transformers_builds(kind, tmp_path):
    """Names and shapes, of a model that is built without memory from the same config.json."""
    config = AutoConfig.for_model(kind, **SIZES, **FAMILIES[kind])
    config.save_pretrained(tmp_path)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    expected = {name: tuple(value.shape) for name, value in model.named_parameters()}  # a tied one once
    shape = read_shape("actor", tmp_path)
    assert {p.name: p.shape for p in parameters(ModelSpec("actor", "", "lm", shape))} == expected
    assert shape.max_position_embeddings == config.max_position_embeddings
    assert shape.not_run


@pytest.mark.parametrize("kind", FAMILIES)
def test_a_run_refuses_what_can_only_be_planned(kind, tmp_path):
    config = AutoConfig.for_model(kind, **SIZES, **FAMILIES[kind], architectures=[f"{kind}ForCausalLM"])
    config.save_pretrained(tmp_path)
    with pytest.raises(InvalidInput, match="config.json.architectures: got .*, expected the Llama family"):
        read_model_spec("actor", tmp_path, "lm")


def test_what_a_config_says_nothing_of_is_as_transformers_has_it(tmp_path):
    """Gemma 3's config.json with pictures leaves out most of its text model."""
    text = {"hidden_size": 2560, "intermediate_size": 10240, "num_hidden_layers": 34}
    shape = read_shape("actor", written(tmp_path, {"model_type": "gemma3", "text_config": text}))
    config = AutoConfig.for_model("gemma3_text", **text)
    assert (shape.num_attention_heads, shape.num_kv_heads) == (config.num_attention_heads, config.num_key_value_heads)
    assert (shape.head_dim, shape.vocab_size) == (config.head_dim, config.vocab_size)
    assert shape.tied_embeddings and shape.max_position_embeddings == config.max_position_embeddings


SWITCHED_OFF = [
    {"attention_bias": False},
    {"mlp_bias": None},
    {"rope_scaling": None},
    {"rope_scaling": {"type": "linear", "factor": 1.0}},
    {"sliding_window": 4096, "use_sliding_window": False},
    {"quantization_config": None},
    {"num_local_experts": 0},
    {"hidden_act": "silu"},
]


@pytest.mark.parametrize("off", SWITCHED_OFF, ids=str)
def test_what_is_switched_off_in_a_config_is_not_refused(off, tmp_path):
    config = {"model_type": "llama", "architectures": ["LlamaForCausalLM"], **SIZES, **off}
    assert not read_shape("actor", written(tmp_path, config)).not_run


@pytest.mark.parametrize(
    ("other", "line"),
    [
        ({"model_type": "mixtral", "num_local_experts": 8}, "num_local_experts: got 8, expected a dense model"),
        ({"model_type": "qwen3_moe", "num_experts": 128}, "num_experts: got 128, expected a dense model"),
        ({"model_type": "gpt2"}, "model_type: got 'gpt2', expected a dense decoder: llama, mistral, qwen2"),
        ({"model_type": ["llama"]}, "model_type: got .*, expected a dense decoder"),
        ({"model_type": "llama", "attention_bias": "no"}, "attention_bias: got 'no', expected true or false"),
        ({"model_type": "llama", "quantization_config": {"bits": 4}}, "quantization_config: .*no quantised weights"),
    ],
    ids=str,
)
def test_what_cannot_be_planned_is_one_line(other, line, tmp_path):
    with pytest.raises(InvalidInput, match=line) as raised:
        read_shape("actor", written(tmp_path, SIZES | other))
    assert "\n" not in str(raised.value)
