"""An answer ends where the chat template ends it, in data, generation and exports alike."""

import json

import pytest
from transformers import AutoTokenizer, GenerationConfig

from prefect_rlhf.engines.sampling.chats.answer_end import answer_end, check_eos_token, end_tokens
from prefect_rlhf.errors.errors import InvalidInput
from prefect_rlhf.tasks.data.answer_pieces import chat_pieces, masked_tokens
from prefect_rlhf.tasks.data.datasets import PreferenceDataset
from prefect_rlhf.tasks.data.tokenizer import answered_tokens, end_remark
from tests.engines.sampling.stand_ins import FAMILIES, SPECIAL, stand_in
from tests.tasks.small_tokenizer import TEMPLATE, save_small_tokenizer

pytestmark = pytest.mark.quick

CLOSED = TEMPLATE.replace(
    "{{ m.content }} ", "{{ m.content }} {% if m.role == 'assistant' %}{{ eos_token }} {% endif %}"
)
WITH_BEST = CLOSED.replace("{{ eos_token }}", "best")
ASKED = [{"role": "user", "content": "what is it"}]


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    """The folder of a base model: its tokenizer and generation_config.json end texts, its template ends turns."""
    folder = tmp_path_factory.mktemp("base")
    stand_in("qwen2_5", folder)
    tokenizer = AutoTokenizer.from_pretrained(folder, eos_token="<|endoftext|>")
    tokenizer.save_pretrained(folder)
    end = tokenizer.convert_tokens_to_ids("<|endoftext|>")
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": end}))
    return str(folder)


@pytest.mark.parametrize("family", FAMILIES)
def test_an_answer_ends_as_its_template_writes_it(tmp_path, family):
    folder = stand_in(family, tmp_path)
    end = answer_end(AutoTokenizer.from_pretrained(folder))
    assert (end.text, end.source) == (SPECIAL[family][1], "the chat template")
    assert end_tokens(folder)[0] == end.token


def test_a_base_models_response_ends_at_the_template_and_at_the_ends_of_its_files(base):
    tokenizer = AutoTokenizer.from_pretrained(base)
    assert tokenizer.eos_token == "<|endoftext|>"
    names = tokenizer.convert_ids_to_tokens(list(end_tokens(base)))
    assert names == ["<|im_end|>", "<|endoftext|>"]
    end, other = end_tokens(base)
    says = f"an answer ends with <|im_end|> ({end}), from the chat template"
    assert end_remark(base) == f"{says}; a response also ends with <|endoftext|> ({other})"


def paired(folder, tmp_path, **settings):
    """Return the tokens of a pair's prompt and better answer, and how many of them are the prompt's."""
    path = tmp_path / "pairs.jsonl"
    path.write_text(json.dumps({"prompt": ASKED, "chosen": "a film", "rejected": "good"}))
    read = PreferenceDataset("pairs", str(path), str(folder), split_column=None, **settings).read([0])
    return read["tokens"][0], read["prompt_length"][0]


def test_chats_and_pairs_end_with_the_token_at_which_generation_ends(base, tmp_path):
    tokenizer = AutoTokenizer.from_pretrained(base)
    chat = [*ASKED, {"role": "assistant", "content": "a film"}]
    learnt = masked_tokens(tokenizer, chat_pieces(tokenizer, chat, "here"))
    tokens, length = paired(base, tmp_path)
    assert tokens == learnt.tokens
    assert length == learnt.prompt_length
    assert tokens[-1] == end_tokens(base)[0]


def test_a_text_ends_with_the_tokenizers_end_which_ends_a_response_too(base):
    tokenizer = AutoTokenizer.from_pretrained(base)
    tokens, _ = answered_tokens(tokenizer, "it is", "good", True)
    assert tokens[-1] == tokenizer.eos_token_id
    assert tokens[-1] in end_tokens(base)


def test_without_a_template_the_tokenizers_end_counts(tmp_path):
    folder = save_small_tokenizer(tmp_path, template=None)
    assert str(answer_end(AutoTokenizer.from_pretrained(folder))) == "an answer ends with </s> (2), from the tokenizer"
    assert end_tokens(folder) == (2,)


@pytest.mark.parametrize("template", [TEMPLATE, "{{ raise_exception('no') }}"])
def test_a_template_that_writes_no_end_leaves_it_to_the_tokenizer(tmp_path, template):
    end = answer_end(AutoTokenizer.from_pretrained(save_small_tokenizer(tmp_path, template)))
    assert str(end) == "an answer ends with </s> (2), from the tokenizer: its chat template writes no end"


@pytest.mark.parametrize(
    ("template", "says"), [(CLOSED, "a film best"), (WITH_BEST, "a film best"), (TEMPLATE, "a film best")]
)
def test_a_setting_says_otherwise(tmp_path, template, says):
    """The template has it as its variable, and else it stands in the place of the template's end."""
    tokenizer = AutoTokenizer.from_pretrained(save_small_tokenizer(tmp_path, template))
    chat = [*ASKED, {"role": "assistant", "content": "a film"}]
    pieces = chat_pieces(tokenizer, chat, "here", variables={"eos_token": "best"})
    learnt = masked_tokens(tokenizer, pieces, "best")
    assert tokenizer.decode(learnt.tokens[learnt.prompt_length :]) == says
    tokens, length = paired(tmp_path, tmp_path, eos_token="best")
    assert tokenizer.decode(tokens[length:]) == says
    assert end_tokens(str(tmp_path), "best")[0] == learnt.tokens[-1]
    assert str(answer_end(tokenizer, "best")).endswith("from the setting eos_token")


def test_a_token_that_the_tokenizer_lacks_is_refused(base):
    tokenizer = AutoTokenizer.from_pretrained(base)
    with pytest.raises(
        InvalidInput, match=r"^actor.eos_token: got '<\|end\|>', expected a token .*such as <\|im_end\|>"
    ):
        check_eos_token(tokenizer, "<|end|>", "actor.eos_token")
    check_eos_token(tokenizer, "<|endoftext|>", "actor.eos_token")


def test_files_alone_name_the_ends_of_a_folder_without_a_tokenizer(tmp_path):
    GenerationConfig(eos_token_id=[4, 5]).save_pretrained(tmp_path)
    assert end_tokens(str(tmp_path)) == (4, 5)
