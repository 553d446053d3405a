"""Tokenizers that transformers makes of a folder, against the library tokenizers on the same tokenizer.json."""

import json

import pytest
from tokenizers import Tokenizer
from tokenizers.processors import ByteLevel, TemplateProcessing
from transformers import AutoTokenizer

from prefect_rlhf.engines.sampling.chats.tokenizers import corrected_files, loaded
from tests.engines.sampling.stand_ins import stand_in

TEXTS = ["the film is good", "  two  spaces", "a\nb\n\n c", "caf\u00e9 \U0001f642", "<|eot_id|>x"]
BEGIN = "<|begin_of_text|>"


def distillate(folder, processor=None, **changes):
    """Save a tokenizer as in DeepSeek-R1-Distill-Llama-8B: Llama 3's bytes, under the class of Llama 2's."""
    stand_in("llama3_1", folder)
    (folder / "config.json").write_text(json.dumps({"model_type": "llama"}))
    config = json.loads((folder / "tokenizer_config.json").read_text())
    changes = {"tokenizer_class": "LlamaTokenizerFast", "legacy": True, **changes}
    (folder / "tokenizer_config.json").write_text(json.dumps(config | changes))
    made = Tokenizer.from_file(str(folder / "tokenizer.json"))
    made.post_processor = processor or TemplateProcessing(
        f"{BEGIN} $A", special_tokens=[(BEGIN, made.token_to_id(BEGIN))]
    )
    made.save(str(folder / "tokenizer.json"))
    return str(folder), made


def tokens(tokenizer):
    return [list(tokenizer(text)["input_ids"]) for text in TEXTS]


def test_bytes_under_the_class_of_llama_2_keep_their_spaces(tmp_path):
    """transformers 5 alone drops them, in a folder of any other name than DeepSeek's on the Hub."""
    folder, file = distillate(tmp_path / "r1", add_bos_token=True)
    found = loaded(folder)
    assert tokens(found) == [file.encode(text).ids for text in TEXTS]
    assert [found.decode(found(text, add_special_tokens=False)["input_ids"]) for text in TEXTS] == TEXTS
    assert found.chat_template == AutoTokenizer.from_pretrained(folder).chat_template


@pytest.mark.parametrize(
    ("stated", "begins"), [({}, True), ({"add_bos_token": True}, True), ({"add_bos_token": False}, False)]
)
@pytest.mark.parametrize("processor", [None, ByteLevel()], ids=["begins", "bytes"])
def test_a_text_begins_as_the_config_states(tmp_path, processor, stated, begins):
    """As transformers 4 reads LlamaTokenizerFast, whatever tokenizer.json says."""
    folder, file = distillate(tmp_path / "r1", processor, **stated)
    expected = [file.encode(text, add_special_tokens=False).ids for text in TEXTS]
    begin = [file.token_to_id(BEGIN)] if begins else []
    assert tokens(loaded(folder)) == [begin + each for each in expected]


def test_an_export_is_read_alike_by_transformers_alone(tmp_path):
    folder, _ = distillate(tmp_path / "r1", ByteLevel(), add_bos_token=True)
    for name, text in corrected_files(folder).items():
        (tmp_path / "r1" / name).write_text(text)
    expected = tokens(loaded(folder))
    assert tokens(AutoTokenizer.from_pretrained(folder)) == expected
    assert corrected_files(folder) == {}


def test_a_tokenizer_that_transformers_reads_is_exported_as_it_is(tmp_path):
    assert corrected_files(stand_in("llama3_1", tmp_path / "plain")) == {}
    assert corrected_files(str(tmp_path)) == {}
