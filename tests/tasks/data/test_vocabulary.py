"""Two tokenizers agree on a token id if its bytes are equal, however they spell them."""

import json

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from prefect_rlhf.errors.errors import InvalidInput
from prefect_rlhf.tasks.data.vocabulary import byte_of_letter, have_same_files, of_json, read_vocabulary
from tests.tasks.small_tokenizer import WORDS, save_small_tokenizer

pytestmark = pytest.mark.quick


def bpe(tokens, byte_level):
    """The content of a tokenizer.json that spells as GPT-2, or as sentencepiece, does."""
    made = Tokenizer(models.BPE({token: place for place, token in enumerate(tokens)}, []))
    made.add_special_tokens(["<|end|>"])
    if byte_level:
        made.pre_tokenizer, made.decoder = pre_tokenizers.ByteLevel(), decoders.ByteLevel()
    else:
        made.decoder = decoders.Sequence([decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse()])
    return made, of_json(json.loads(made.to_str()), {})


def test_names_that_spell_the_same_bytes_agree():
    _, gpt = bpe(["\u0120film", "\u010a", "caf\u00c3\u00a9"], byte_level=True)
    _, llama = bpe(["\u2581film", "<0x0A>", "caf\u00e9"], byte_level=False)
    assert [gpt.text(token) for token in range(4)] == [b" film", b"\n", "caf\u00e9".encode(), b"<|end|>"]
    assert gpt.first_difference(llama) is None
    assert llama.first_difference(gpt) is None


def test_equal_names_with_different_bytes_differ():
    """`\u0120` is a space to one, a letter to the other."""
    _, gpt = bpe(["a", "\u0120film"], byte_level=True)
    _, llama = bpe(["a", "\u0120film"], byte_level=False)
    assert gpt.first_difference(llama) == 1


def test_bytes_have_the_same_letters_as_in_the_tokenizers_library():
    assert set(byte_of_letter()) == set(pre_tokenizers.ByteLevel.alphabet())
    assert sorted(byte_of_letter().values()) == list(range(256))
    letters = {byte: letter for letter, byte in byte_of_letter().items()}
    made, vocabulary = bpe(["".join(letters[byte] for byte in " \u00fc\U0001f600\n".encode())], byte_level=True)
    assert vocabulary.text(0).decode() == made.decode([0]) == " \u00fc\U0001f600\n"


def test_the_lowest_different_id_within_the_embedding_is_found():
    _, one = bpe(["a", "b", "c"], byte_level=False)
    _, other = bpe(["a", "c", "b"], byte_level=False)
    assert one.first_difference(other) == 1
    assert one.under(1).first_difference(other) is None
    assert (one.first_difference(one.under(3)), one.under(3).text(3)) == (3, None)


def test_a_vocabulary_is_read_from_every_kind_of_tokenizer_json(tmp_path):
    """A list of pieces with scores is Unigram's."""
    words = read_vocabulary(tmp_path / save_small_tokenizer(tmp_path), "ref.path")
    assert [words.text(token).decode() for token in range(len(WORDS))] == WORDS
    pieces = Tokenizer(models.Unigram([("<unk>", 0.0), ("\u2581a", -1.0), ("b", -2.0)], unk_id=0))
    PreTrainedTokenizerFast(tokenizer_object=pieces, unk_token="<unk>").save_pretrained(tmp_path / "unigram")
    assert [read_vocabulary(tmp_path / "unigram", "ref.path").text(token) for token in (1, 2)] == [b" a", b"b"]


def test_a_lone_sentencepiece_model_is_read_too(tmp_path):
    from sentencepiece import SentencePieceTrainer

    (tmp_path / "text.txt").write_text("a good film\na bad film\nwhat is it\n" * 20)
    SentencePieceTrainer.train(
        input=str(tmp_path / "text.txt"), model_prefix=str(tmp_path / "tokenizer"), vocab_size=300, model_type="bpe",
        byte_fallback=True, normalization_rule_name="identity", remove_extra_whitespaces=False, minloglevel=2,
    )  # fmt: skip
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    vocabulary = read_vocabulary(tmp_path, "ref.path")
    assert b" film" in {vocabulary.text(token) for token in vocabulary.names}


def test_a_folder_without_a_tokenizer_has_no_vocabulary(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    assert read_vocabulary(tmp_path, "ref.path") is None
    assert not have_same_files(tmp_path, tmp_path, "ref.path")


def test_tokens_added_by_the_config_count(tmp_path):
    """transformers adds those that tokenizer.json lacks."""
    for name in ("one", "other"):
        save_small_tokenizer(tmp_path / name)
    assert have_same_files(tmp_path / "one", tmp_path / "other", "ref.path")
    config = tmp_path / "other" / "tokenizer_config.json"
    config.write_text(json.dumps({"added_tokens_decoder": {"14": {"content": "<pad>"}}}))
    assert not have_same_files(tmp_path / "one", tmp_path / "other", "ref.path")
    one, other = (read_vocabulary(tmp_path / name, "ref.path") for name in ("one", "other"))
    assert (one.first_difference(other), other.first_difference(one)) == (None, 14)


@pytest.mark.parametrize("content", [b"{", b"[]", b'{"model": {}}', b'{"model": {"vocab": 3}}', b"[" * 100_000])
def test_an_unreadable_tokenizer_is_refused_in_one_line(tmp_path, content):
    (tmp_path / "tokenizer.json").write_bytes(content)
    with pytest.raises(InvalidInput, match=r"^ref.path: got '.*tokenizer.json', expected a tokenizer that can") as said:
        read_vocabulary(tmp_path, "ref.path")
    assert "\n" not in str(said.value)
