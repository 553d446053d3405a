"""Tokenizers of folders with only sentencepiece's tokenizer.model, against sentencepiece itself."""

import json
import shutil
from io import BytesIO
from pathlib import Path

import mistral_common
import pytest
from sentencepiece import SentencePieceProcessor, SentencePieceTrainer
from transformers import AutoTokenizer

from prefect_rlhf.engines.files.huggingface import write_tokenizer
from prefect_rlhf.engines.sampling.chats.tokenizers import corrected_files, loaded
from prefect_rlhf.errors.errors import InvalidInput
from prefect_rlhf.placement.models.known_models import KNOWN_SHAPES
from prefect_rlhf.placement.models.model import ModelSpec
from prefect_rlhf.tasks.data.tokenizer import load_tokenizer

MISTRAL = Path(mistral_common.__file__).parent / "data" / "tokenizer.model.v1"
TEXTS = ["The film is good", "a\nb\n\n c", "caf\u00e9 \u2603", "in 1971 two  spaces"]
STATED = {"tokenizer_class": "LlamaTokenizer", "bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
LIKE_LLAMA = {"normalization_rule_name": "identity", "remove_extra_whitespaces": False, "byte_fallback": True}


def folder_of(folder, model_type, stated, model=MISTRAL):
    folder.mkdir(exist_ok=True)
    shutil.copy(model, folder / "tokenizer.model")
    (folder / "config.json").write_text(json.dumps({"model_type": model_type}))
    if stated is not None:
        (folder / "tokenizer_config.json").write_text(json.dumps(stated))
    return str(folder)


def trained(file, kind="bpe", **options):
    """Train a small model of pieces."""
    words, made = ["the film is good", "what is it", "in the night a 1234 number", "a  b   c"], BytesIO()
    options = {"vocab_size": 330, "hard_vocab_limit": False, "minloglevel": 3, **LIKE_LLAMA, **options}
    SentencePieceTrainer.train(sentence_iterator=iter(words * 50), model_writer=made, model_type=kind, **options)
    file.write_bytes(made.getvalue())
    return file


@pytest.mark.parametrize("model_type", ["llama", "mistral"])
@pytest.mark.parametrize(
    ("stated", "begins"),
    [
        (None, True),
        (STATED, True),
        ({**STATED, "add_bos_token": True, "legacy": True}, True),
        ({**STATED, "add_bos_token": False}, False),
    ],
)
def test_texts_become_sentencepieces_tokens_and_begin_as_in_transformers_4(tmp_path, model_type, stated, begins):
    """An export is read so by transformers alone, and so by vLLM."""
    folder, pieces = folder_of(tmp_path / "model", model_type, stated), SentencePieceProcessor(str(MISTRAL))
    begin = [pieces.bos_id()] if begins else []
    expected = [begin + pieces.encode(text) for text in TEXTS]
    found = loaded(folder)
    assert [found(text)["input_ids"] for text in TEXTS] == expected
    assert [found.decode(pieces.encode(text)) for text in TEXTS] == TEXTS
    (tmp_path / "export").mkdir()
    write_tokenizer(
        tmp_path / "export", ModelSpec("actor", folder, "lm", KNOWN_SHAPES["mistral-7b"]), tmp_path / "model"
    )
    shutil.copy(tmp_path / "model" / "config.json", tmp_path / "export")
    alone = AutoTokenizer.from_pretrained(tmp_path / "export")
    assert [alone(text)["input_ids"] for text in TEXTS] == expected
    assert (alone.bos_token, alone.eos_token, alone.unk_token) == ("<s>", "</s>", "<unk>")


def test_a_tokenizer_that_transformers_reads_rightly_is_exported_as_it_is(tmp_path):
    stated, model = {**STATED, "add_bos_token": True}, trained(tmp_path / "small.model")
    assert corrected_files(folder_of(tmp_path / "llama", "llama", stated, model)) == {}


def test_a_model_without_a_space_before_the_first_word_is_read_so(tmp_path):
    """Gemma's, and a Llama's that says so."""
    gemma = trained(tmp_path / "gemma.model", add_dummy_prefix=False)
    stated = {**STATED, "tokenizer_class": "GemmaTokenizer"}
    found, pieces = loaded(folder_of(tmp_path / "g", "gemma3_text", stated, gemma)), SentencePieceProcessor(str(gemma))
    assert found("the film")["input_ids"] == [pieces.bos_id(), *pieces.encode("the film")]
    said = loaded(folder_of(tmp_path / "l", "llama", {**STATED, "add_prefix_space": False}))
    assert said.convert_ids_to_tokens(said("film")["input_ids"]) == ["<s>", "film"]


@pytest.mark.parametrize(
    ("kind", "options"),
    [("unigram", {}), ("bpe", {"normalization_rule_name": "nmt_nfkc"}), ("bpe", {"add_dummy_prefix": False})],
)
def test_a_model_that_no_class_reads_as_sentencepiece_does_is_refused(tmp_path, kind, options):
    """Of another kind, with a rule for line ends, and without a space under Llama's class."""
    model = trained(tmp_path / "other.model", kind, **options)
    folder = folder_of(tmp_path / "f", "llama", STATED, model)
    says = (
        r"tokenizer: got '.*f', expected a tokenizer that .* \(transformers reads tokenizer.model otherwise than sente"
    )
    with pytest.raises(InvalidInput, match=says) as raised:
        load_tokenizer(folder)
    assert "\n" not in str(raised.value)


def test_a_file_that_is_no_tokenizer_is_refused(tmp_path):
    """transformers makes a tokenizer of three tokens of it."""
    (tmp_path / "cut.model").write_bytes(MISTRAL.read_bytes()[:1000])
    folder = folder_of(tmp_path / "f", "llama", STATED, tmp_path / "cut.model")
    with pytest.raises(InvalidInput, match="expected a tokenizer that transformers can load"):
        load_tokenizer(folder)
