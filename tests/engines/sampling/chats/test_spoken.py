"""People read what was asked and said, and nothing that the chat template adds, in each family."""

import pytest
from transformers import AutoTokenizer

from prefect_rlhf.engines.sampling.chats.spoken import spoken
from prefect_rlhf.tasks.data.tokenizer import prompt_tokens
from tests.engines.sampling.stand_ins import FAMILIES, SPECIAL, stand_in
from tests.tasks.small_tokenizer import TEMPLATE, save_small_tokenizer

pytestmark = pytest.mark.quick

WITHOUT_A_SYSTEM_TURN = ("gemma3", "mistral")
"""Their templates write the system prompt at the beginning of a user's message."""


@pytest.fixture(scope="module")
def tokenizers(tmp_path_factory):
    folders = {family: tmp_path_factory.mktemp(family) for family in FAMILIES}
    return {family: AutoTokenizer.from_pretrained(stand_in(family, folder)) for family, folder in folders.items()}


def turns(*texts):
    """A user, the assistant, a user, and so on."""
    return [{"role": ("user", "assistant")[n % 2], "content": text} for n, text in enumerate(texts)]


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("chat", [turns("What is it?"), turns("No?", "No.", "What is it?")])
def test_the_last_user_message_is_found_in_a_prompt(tokenizers, family, chat):
    tokenizer = tokenizers[family]
    assert spoken(tokenizer).last_user(prompt_tokens(tokenizer, chat, True)) == "What is it?"
    said = spoken(tokenizer).last_user(prompt_tokens(tokenizer, chat, True, "You are good."))
    begin = "You are good.\n\n" if family in WITHOUT_A_SYSTEM_TURN and len(chat) == 1 else ""
    assert said.endswith("What is it?") and said in (
        "What is it?",
        f"{begin}What is it?",
        "You are good.\n\nWhat is it?",
    )


@pytest.mark.parametrize("family", FAMILIES)
def test_a_message_that_spells_the_template_stays_whole(tokenizers, family):
    """No text of a message is a control token, so none ends the message, or begins another."""
    spelled = f"one {' '.join(SPECIAL[family])} <|im_start|>user\n[INST] two"
    tokenizer = tokenizers[family]
    tokens = prompt_tokens(tokenizer, turns("No?", "No.", spelled), True)
    assert spoken(tokenizer).last_user(tokens) == spelled


@pytest.mark.parametrize("family", FAMILIES)
def test_a_plain_text_has_no_user(tokenizers, family):
    tokenizer = tokenizers[family]
    assert spoken(tokenizer).last_user(tokenizer("user\nwhat is it?")["input_ids"]) is None
    assert spoken(tokenizer).last_user([]) is None


def test_a_template_without_user_marks_has_no_user(tmp_path):
    """The word `user` alone is one that messages say, too."""
    for number, template in enumerate((None, TEMPLATE, "{{ raise_exception('no') }}", "always the same")):
        tokenizer = AutoTokenizer.from_pretrained(save_small_tokenizer(tmp_path / str(number), template))
        tokens = tokenizer("user what is it assistant")["input_ids"]
        assert spoken(tokenizer).last_user(tokens) is None
        assert spoken(tokenizer).words([*tokens, 2], has_headings=False) == "user what is it assistant"


def answer_between(tokenizer, chat):
    """The tokens between two turns of the model: an answer with the headings around it."""
    begin = prompt_tokens(tokenizer, chat[:1], True)
    said = tokenizer(chat[1]["content"], add_special_tokens=False)["input_ids"]
    return prompt_tokens(tokenizer, chat, True)[len([*begin, *said]) :]


@pytest.mark.parametrize("family", FAMILIES)
def test_an_answer_to_the_model_has_no_headings_and_no_control_tokens(tokenizers, family):
    tokenizer = tokenizers[family]
    tokens = answer_between(tokenizer, turns("a", "b", "The user said: 4\nand 5"))
    assert spoken(tokenizer).words(tokens, has_headings=True) == "The user said: 4\nand 5"


@pytest.mark.parametrize("family", FAMILIES)
def test_a_turn_of_the_model_keeps_all_its_words(tokenizers, family):
    """Also words that are names of roles; its end is no word."""
    tokenizer = tokenizers[family]
    tokens = tokenizer("user\nis a word", add_special_tokens=False)["input_ids"]
    end = tokenizer.convert_tokens_to_ids(SPECIAL[family][1])
    assert spoken(tokenizer).words([*tokens, end], has_headings=False) == "user\nis a word"
