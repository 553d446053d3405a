"""Strings that end a response, in the words of a byte-level tokenizer: parts of characters, special tokens."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from prefect_rlhf.engines.sampling.stop_strings import StopStrings
from prefect_rlhf.errors.errors import InvalidInput
from tests.support.cases import examples

pytestmark = pytest.mark.quick

STRINGS = ("\n\n", "é", "日本", "<end>")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A tokenizer of single bytes, whose last token is a special one."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({letter: token for token, letter in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<end>")
    path = tmp_path_factory.mktemp("tokenizer")
    fast.save_pretrained(path)
    return str(path), fast


@given(st.text("a\né日本", max_size=30), st.sampled_from(["", *STRINGS]))
@settings(max_examples=examples(60), deadline=None)
def test_a_response_ends_with_the_token_that_completes_a_string(folder, text, last):
    """And with no earlier one: beside the whole text, looked at after each token."""
    path, fast = folder
    stops, tokens = StopStrings(STRINGS, path), fast(text + last)["input_ids"]
    first = next((i for i in range(len(tokens)) if any(s in fast.decode(tokens[: i + 1]) for s in STRINGS)), None)
    found = next((i for i in range(len(tokens)) if stops.ended([tokens[: i + 1]])[0]), None)
    assert found == first
    assert found is not None or not last


def test_a_model_without_a_tokenizer_is_refused_in_one_line(tmp_path):
    with pytest.raises(InvalidInput, match=r"^sampling\.stop: .* expected a tokenizer in the model folder") as error:
        StopStrings(("x",), str(tmp_path))
    assert "\n" not in str(error.value)
