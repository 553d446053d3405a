"""Exports of folders that transformers 5 wrote, as a reader of transformers 4's keys sees them.

transformers 4.40, 4.44, 4.51 and 4.57 were tried by hand: docs/internals/measured_log.md has what they said.
"""

import json
from dataclasses import replace

import pytest
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import AutoConfig, AutoTokenizer, PreTrainedTokenizerFast

from prefect_rlhf.engines.files.huggingface import _config_of, write_tokenizer
from prefect_rlhf.engines.files.model_config import runnable_shape
from prefect_rlhf.placement.models.model import ModelSpec

PLAIN = {"rope_type": "default", "rope_theta": 5e5}
SCALED = {
    **PLAIN,
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
BASES = {"sliding_attention": {"rope_type": "default", "rope_theta": 3e3}, "full_attention": PLAIN}
SIZES = {"hidden_size": 64, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 32, "num_hidden_layers": 7}
NEW = ("rope_parameters", "dtype", "layer_types", "_sliding_window_pattern")
"""What transformers 4.51 does not read."""


def of_version_5(family, folder, **options):
    """Write config.json as transformers 5 does, and return it."""
    config = AutoConfig.for_model(family, **SIZES, dtype="float32", **options)
    config.architectures = [("Gemma3" if family == "gemma3_text" else family.capitalize()) + "ForCausalLM"]
    config.save_pretrained(folder)
    return json.loads((folder / "config.json").read_text())


def exported(folder, config):
    shape = runnable_shape(config, "config.json")
    return _config_of(ModelSpec("actor", str(folder), "lm", shape, dtype="bfloat16"), folder)


@pytest.mark.parametrize(
    ("family", "options"),
    [
        ("llama", {"rope_parameters": PLAIN}),
        ("llama", {"rope_parameters": SCALED}),
        ("mistral", {"rope_parameters": PLAIN, "sliding_window": None}),
        ("qwen2", {"rope_parameters": PLAIN}),
        ("qwen3", {"rope_parameters": PLAIN}),
        *(
            ("gemma3_text", {"rope_parameters": BASES, "layer_types": [f"{kind}_attention" for kind in kinds]})
            for kinds in (
                ["sliding"] * 5 + ["full", "sliding"],
                ["sliding", "full"] * 3 + ["sliding"],
                ["full"] * 7,
                ["sliding"] * 7,
            )
        ),
    ],
)
def test_a_reader_of_older_keys_takes_the_same_model(tmp_path, family, options):
    """transformers without its newer keys finds the same rotary bases, the same kinds of layers and the same format."""
    newest = of_version_5(family, tmp_path, **options)
    whole = exported(tmp_path, newest)
    bare = AutoConfig.for_model(**{key: value for key, value in newest.items() if key not in NEW})
    assert bare.rope_parameters != AutoConfig.for_model(**newest).rope_parameters  # so a base alone would be misread
    found, own = (AutoConfig.for_model(**{**config, "dtype": None}) for config in (without_new(whole), newest))
    kinds = set(newest["layer_types"]) if family == "gemma3_text" else found.rope_parameters.keys()
    assert {kind: found.rope_parameters[kind] for kind in kinds} == {kind: own.rope_parameters[kind] for kind in kinds}
    assert getattr(found, "layer_types", None) == getattr(own, "layer_types", None)
    assert whole["torch_dtype"] == whole["dtype"] == "bfloat16"
    assert AutoConfig.for_model(**whole).rope_parameters == own.rope_parameters  # with both kinds of keys
    assert runnable_shape(whole, "config.json") == runnable_shape(newest, "config.json")


def without_new(config):
    return {key: value for key, value in config.items() if key not in NEW}


def test_layers_that_no_older_key_describes_have_no_older_key(tmp_path):
    kinds = ["full_attention", *["sliding_attention"] * 6]
    newest = of_version_5("gemma3_text", tmp_path, rope_parameters=BASES, layer_types=kinds)
    assert "sliding_window_pattern" not in exported(tmp_path, newest)


@pytest.mark.parametrize("own", [None, "{{ 'of mine' }}"])
def test_transformers_4_can_read_a_tokenizer_that_5_wrote_and_5_reads_it_as_before(tmp_path, own):
    """4.57 says that TokenizersBackend does not exist, and fails at a list of extra_special_tokens."""
    vocabulary = {word: number for number, word in enumerate(("<s>", "</s>", "<a>", "<b>", "good"))}
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(WordLevel(vocabulary, "<s>")),
        eos_token="</s>",
        extra_special_tokens=["<a>", "<b>"],
        chat_template="{{ 'of the folder' }}",
    )
    tokenizer.save_pretrained(tmp_path / "source")
    newest = of_version_5("llama", tmp_path / "source", rope_parameters=PLAIN)
    before = json.loads((tmp_path / "source" / "tokenizer_config.json").read_text())
    assert before["tokenizer_class"] == "TokenizersBackend" and isinstance(before["extra_special_tokens"], list)
    spec = ModelSpec("actor", str(tmp_path / "source"), "lm", runnable_shape(newest, "config.json"))
    (tmp_path / "written").mkdir()
    write_tokenizer(tmp_path / "written", replace(spec, chat_template=own), tmp_path / "source")
    config = json.loads((tmp_path / "written" / "tokenizer_config.json").read_text())
    assert config["tokenizer_class"] == "PreTrainedTokenizerFast" and "extra_special_tokens" not in config
    assert config["chat_template"] == (tmp_path / "written" / "chat_template.jinja").read_text()
    found, first = (AutoTokenizer.from_pretrained(tmp_path / name) for name in ("written", "source"))
    assert type(found) is type(first) and found.chat_template == (own or first.chat_template)
    assert found.all_special_tokens == first.all_special_tokens
    assert found("good <a> good</s>")["input_ids"] == first("good <a> good</s>")["input_ids"]
