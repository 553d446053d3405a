"""The prompt that two texts begin with is that of TRL's `extract_prompt`, but it ends with a whole word."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from prefect_rlhf.blocks.dataset import Preferences
from prefect_rlhf.errors.errors import InvalidInput
from prefect_rlhf.flows.training.inputs import open_source
from prefect_rlhf.tasks.data.formats.pairs import pair_of_chats, pair_of_texts
from prefect_rlhf.tasks.data.formats.turns import messages_of
from tests.tasks.data.formats.trl_formats import extract_prompt, maybe_convert_to_chatml
from tests.tasks.data.stored import ask, say
from tests.tasks.small_tokenizer import WORDS, ids, save_small_tokenizer

pytestmark = pytest.mark.quick

HH = "\n\nHuman: Hi, I want a cat.\n\nAssistant: A cat?\n\nHuman: Yes.\n\nAssistant:"
words = st.lists(st.sampled_from(["a", "cat", "dog", "the", "is", "blue", "green"]), min_size=1, max_size=5).map(
    " ".join
)


@given(words, words, words)
def test_texts_with_different_first_words_get_trls_prompt(prompt, chosen, rejected):
    """Words that begin with different letters."""
    if chosen[0] == rejected[0]:
        rejected = f"x{rejected}"
    sides = {"chosen": f"{prompt} {chosen}", "rejected": f"{prompt} {rejected}"}
    right = extract_prompt(sides)
    assert pair_of_texts("row 0", **sides) == (right["prompt"], right["chosen"], right["rejected"])


@given(words, words, words)
def test_a_text_is_cut_into_prompt_and_answer_between_words(prompt, chosen, rejected):
    sides = [f"{HH} {prompt} {chosen}", f"{HH} {prompt} {rejected}"], [f"{prompt} {chosen}", f"{prompt} {rejected}"]
    for one, other in sides:
        if one == other:
            continue
        cut, *answers = pair_of_texts("row 0", one, other)
        assert [cut + answer for answer in answers] == [one, other]
        assert not any(cut[-1].isalnum() and answer[:1].isalnum() for answer in answers)
        assert one.startswith(HH) is (cut == HH)


TEXTS = {
    "TRL's documentation": (
        ("The sky is blue.", "The sky is green."),
        ("The sky is", " blue.", " green."),
    ),
    "hh-rlhf": (
        (f"{HH} Take one.", f"{HH} No."),
        (HH, " Take one.", " No."),
    ),
    "hh-rlhf, answers that begin alike": (  # TRL: the prompt ends with the shared words
        (f"{HH} You should take one.", f"{HH} You should not."),
        (HH, " You should take one.", " You should not."),
    ),
    "a word that begins alike": (  # TRL: the prompt ends with "gr"
        ("The sky is green.", "The sky is grey."),
        ("The sky is", " green.", " grey."),
    ),
    "the beginning of the other": (
        ("The sky is blue", "The sky is"),
        ("The sky is", " blue", ""),
    ),
}


@pytest.mark.parametrize("case", TEXTS)
def test_the_prompt_of_texts(case):
    sides, right = TEXTS[case]
    assert pair_of_texts("row 0", *sides) == right


@pytest.mark.parametrize(
    ("chosen", "rejected", "says"),
    [
        (
            "a film",
            "the film",
            r"^pairs row 0: got 'a film', expected texts that begin alike.*prompt_column null, both",
        ),
        ("it is good", "it is", r"^pairs row 0 rejected: got '', expected an answer that is not empty"),
        ("it is", "it is", r"^pairs row 0: got 'it is', expected two answers that differ"),
        ("it is", "", r"^pairs row 0: got 'it is', expected texts that begin alike"),
    ],
)
def test_texts_without_a_prompt_or_an_answer_are_refused(stored, tmp_path_factory, chosen, rejected, says):
    tokenizer = save_small_tokenizer(tmp_path_factory.mktemp("words"))
    path = stored({"chosen": chosen, "rejected": rejected})
    with pytest.raises(InvalidInput, match=says):
        open_source("pairs", Preferences(path=path, split_column=None), tokenizer).check(max_tokens=40)


def test_text_pairs_get_their_common_beginning_as_prompt(stored, tmp_path_factory):
    tokenizer = save_small_tokenizer(tmp_path_factory.mktemp("words"))
    path = stored({"chosen": "what is it it is good", "rejected": "what is it it is bad"})
    source = open_source("pairs", Preferences(path=path, split_column=None), tokenizer)
    source.check(max_tokens=40)
    read = source.read([0, 1])
    assert read["tokens"] == [ids("<s> what is it it is good"), ids("<s> what is it it is bad")]
    assert read["prompt_length"] == [len(ids("<s> what is it it is"))] * 2
    assert source.rows.remark.endswith(
        "is read as pairs (chosen, rejected); the prompt is what both answers begin with"
    )
    plain = open_source("pairs", Preferences(path=path, split_column=None, prompt_column=None), tokenizer)
    assert plain.read([0])["prompt_length"] == [1]
    assert plain.rows.remark.endswith("is read as pairs (chosen, rejected)")


asked = st.sampled_from(WORDS[3:]).map(ask)
chats = st.lists(asked, min_size=1, max_size=4)


@given(chats, st.sampled_from(WORDS[3:]), st.sampled_from(WORDS[3:]))
def test_message_pairs_get_trls_prompt(prompt, chosen, rejected):
    if chosen == rejected:
        return
    right = extract_prompt({"chosen": [*prompt, say(chosen)], "rejected": [*prompt, say(rejected)]})
    found = pair_of_chats("row 0", (None, [*prompt, say(chosen)], [*prompt, say(rejected)]))
    assert found == (right["prompt"], right["chosen"][0]["content"], right["rejected"][0]["content"])


@given(st.lists(st.sampled_from(WORDS[3:]), min_size=1, max_size=6))
def test_turns_become_the_same_messages_as_in_trl(texts):
    turns = [{"from": ("user", "assistant")[number % 2], "value": text} for number, text in enumerate(texts)]
    right = maybe_convert_to_chatml({"conversations": [dict(turn) for turn in turns]})["messages"]
    assert messages_of(turns, "row 0", "file", is_whole=True) == right
