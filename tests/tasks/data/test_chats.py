"""Chats, completions and texts to learn: which tokens are trained on, and what is refused in one line."""

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from prefect_rlhf.errors.errors import InvalidInput
from prefect_rlhf.tasks.data.answer_pieces import chat_pieces, masked_tokens
from prefect_rlhf.tasks.data.chats import ChatDataset
from prefect_rlhf.tasks.data.tokenizer import load_tokenizer
from tests.tasks.data.stored import ask, json_lines, parquet, saved, say
from tests.tasks.small_tokenizer import TEMPLATE, WORDS, ids, save_small_tokenizer

pytestmark = pytest.mark.quick

CLOSING = (  # an answer ends with </s>, and a line that nobody samples
    "{% for m in messages %}{{ m.role }} {{ m.content }} {% if m.role == 'assistant' %}</s> the {% endif %}{% endfor %}"
    "{% if add_generation_prompt %}assistant{% endif %}"
)
FORGETFUL = (  # of earlier answers only the heading is kept, as templates do that leave out thoughts
    "{% for m in messages %}{{ m.role }} {% if m.role != 'assistant' or loop.last %}{{ m.content }} {% endif %}"
    "{% endfor %}{% if add_generation_prompt %}assistant{% endif %}"
)
OTHER_HEADING = (
    "{% for m in messages %}{{ m.role }} {{ m.content }} {% endfor %}{% if add_generation_prompt %}bot{% endif %}"
)
LOUD = "{% if messages[0].role == 'system' %}{{ raise_exception('no system message') }}{% endif %}" + TEMPLATE


TWO_TURNS = [ask("what is it"), say("a film"), ask("is it good"), say("the best")]


def with_template(tmp_path_factory, template):
    return save_small_tokenizer(tmp_path_factory.mktemp("tokenizer"), template)


def learnt(source, row=0):
    """All words of a row, and those among them that are trained on."""
    read = source.read([row])
    tokens, length, mask = (read[key][0] for key in ("tokens", "prompt_length", "mask"))
    assert len(mask) == len(tokens) - length
    trained = [token for token, counts in zip(tokens[length:], mask, strict=True) if counts]
    return (" ".join(WORDS[token] for token in some) for some in (tokens, trained))


FORMS = {
    "messages": (
        {"messages": TWO_TURNS},
        "user what is it assistant a film user is it good assistant the best",
        "a film the best",
    ),
    "what follows the last answer": (
        {"messages": [*TWO_TURNS[:2], ask("good")]},
        "user what is it assistant a film",
        "a film",
    ),
    "text to complete": ({"prompt": "it is", "completion": "a film"}, "<s> it is a film </s>", "a film </s>"),
    "no prompt": ({"prompt": "", "completion": "a film"}, "<s> a film </s>", "a film </s>"),
    "messages to complete": (
        {"prompt": TWO_TURNS[:3], "completion": TWO_TURNS[3:]},
        "user what is it assistant a film user is it good assistant the best",
        "the best",
    ),
    "text": ({"text": "it is a film"}, "<s> it is a film </s>", "it is a film </s>"),
    "text with its end": ({"text": "it is a film </s>"}, "<s> it is a film </s>", "it is a film </s>"),
    "completion with its end": ({"prompt": "it is", "completion": "a </s>"}, "<s> it is a </s>", "a </s>"),
    **{
        f"{key}: {value}": (
            {"messages": [TWO_TURNS[0], {**TWO_TURNS[1], key: value}, *TWO_TURNS[2:]]},
            "user what is it assistant a film user is it good assistant the best",
            trained,
        )
        for key, no, yes in (("train", False, True), ("weight", 0.0, 1.0), ("loss", False, True))
        for value, trained in ((no, "the best"), (yes, "a film the best"))
    },
}


@pytest.mark.parametrize("case", FORMS)
@pytest.mark.parametrize("stored", ["json lines", "parquet", "saved"])
def test_a_rows_mask_marks_the_tokens_that_are_learnt(tmp_path, tokenizer, case, stored):
    row, whole, trained = FORMS[case]
    columns = {name: [value] for name, value in row.items()}
    path = {
        "json lines": lambda: json_lines(tmp_path / "c.jsonl", row),
        "parquet": lambda: parquet(tmp_path / "c.parquet", **columns),
        "saved": lambda: saved(tmp_path / "c", pa.table(columns)),
    }[stored]()
    source = ChatDataset("chats", path, tokenizer, split_column=None)
    assert source.check(max_tokens=40).longest == len(whole.split())
    assert tuple(learnt(source)) == (whole, trained)


def test_text_through_the_chat_template_is_a_question_and_its_answer(tmp_path, tokenizer):
    path = json_lines(tmp_path / "c.jsonl", {"prompt": "what is it", "completion": "a film"})
    source = ChatDataset("chats", path, tokenizer, split_column=None, chat_template=True)
    source.check(max_tokens=40)
    assert tuple(learnt(source)) == ("user what is it assistant a film", "a film")


def test_an_answer_ends_with_its_last_end_of_sequence(tmp_path, tmp_path_factory):
    """What a template writes between that and the next question is read, and never learnt."""
    tokenizer = with_template(tmp_path_factory, CLOSING)
    source = ChatDataset(
        "chats", json_lines(tmp_path / "c.jsonl", {"messages": TWO_TURNS}), tokenizer, split_column=None
    )
    source.check(max_tokens=40)
    whole, trained = learnt(source)
    assert whole == "user what is it assistant a film </s> the user is it good assistant the best </s>"
    assert trained == "a film </s> the best </s>"


words = st.lists(st.sampled_from(WORDS[3:]), min_size=1, max_size=4).map(" ".join)
turns = st.lists(st.tuples(st.sampled_from(["user", "assistant"]), words), min_size=1, max_size=6)


@given(turns)
def test_in_every_chat_exactly_the_answers_words_are_learnt(tokenizer, chat):
    messages = [{"role": "user", "content": "what"}, *({"role": role, "content": text} for role, text in chat)]
    row = masked_tokens(load_tokenizer(tokenizer), chat_pieces(load_tokenizer(tokenizer), messages, "here"))
    answers = [word for role, text in chat if role == "assistant" for word in text.split()]
    trained = [token for token, counts in zip(row.tokens[row.prompt_length :], row.mask, strict=True) if counts]
    assert [WORDS[token] for token in trained] == answers
    assert row.tokens == ids("".join(f"{turn['role']} {turn['content']} " for turn in messages))[: len(row.tokens)]


@pytest.mark.parametrize(
    ("template", "chat", "says"),
    [
        (None, TWO_TURNS, r"^chats.chat_template: got .*, expected a tokenizer that has a chat template"),
        (FORGETFUL, TWO_TURNS, r"^chats row 1 messages message 2: .* keeps its earlier text when this message"),
        (OTHER_HEADING, TWO_TURNS, r"^chats row 0 messages message 1: .* earlier text when the answer follows"),
        (LOUD, [{"role": "system", "content": "good"}, *TWO_TURNS], r"^chats row 1 messages: .*\(no system message\)"),
    ],
    ids=["missing", "forgetful", "another heading", "refuses"],
)
def test_a_template_that_changes_earlier_text_is_refused(tmp_path, tmp_path_factory, template, chat, says):
    """With row and message."""
    tokenizer = with_template(tmp_path_factory, template)
    rows = {"messages": TWO_TURNS[:2]}, {"messages": chat}
    source = ChatDataset("chats", json_lines(tmp_path / "c.jsonl", *rows), tokenizer, split_column=None)
    with pytest.raises(InvalidInput, match=says) as refused:
        source.check(max_tokens=40)
    assert "\n" not in str(refused.value)


BAD_ROWS = {
    "no column": ({"question": "a"}, {}, r"^chats.path: .* with columns messages, prompt and .* it has question$"),
    "two forms": ({"messages": TWO_TURNS, "text": "a"}, {}, r"^chats.form: missing; expected messages or text: "),
    "half a form": ({"completion": "a"}, {}, r"^chats.prompt_column: got 'prompt', .* it has completion"),
    "text for messages": ({"messages": "a film"}, {}, r"^chats.messages: got 'text', expected lists of \{role"),
    "messages for text": ({"text": TWO_TURNS}, {}, r"^chats.text: got 'list', expected strings"),
    "numbers": ({"prompt": "a", "completion": 3}, {}, r"^chats.completion: got 'int', expected strings, or"),
    "a text as chat": ({"text": "a film"}, {"chat_template": True}, r"^chats.chat_template: got True, expected false"),
    "no answer": ({"messages": TWO_TURNS[:1]}, {}, r"^chats row 0 messages: got 'nothing to learn', expected a mess"),
    "a blank answer": ({"prompt": "a", "completion": " "}, {}, r"^chats row 0 completion: got ' ', expected text"),
    "a blank message": ({"messages": [ask("a"), say("")]}, {}, r"^chats row 0 messages: .* not empty"),
    "null": ({"prompt": None, "completion": "a"}, {}, r"^chats.prompt: got 'null'"),
    "an empty chat": ({"messages": []}, {}, r"^chats.messages|^chats row 0 messages: got \[\]"),
    "too long": ({"text": "a a a a a a a a a"}, {}, r"^chats row 0: got '11 tokens', expected at most 9"),
    "unknown words": ({"text": "zzz"}, {}, r"^chats row 0: .* text that the tokenizer"),
}


@pytest.mark.parametrize("case", BAD_ROWS)
def test_rows_that_cannot_be_learnt_are_refused_in_one_line(tmp_path, tokenizer, case):
    row, settings, says = BAD_ROWS[case]
    source = ChatDataset("chats", json_lines(tmp_path / "c.jsonl", row), tokenizer, split_column=None, **settings)
    with pytest.raises(InvalidInput, match=says) as refused:
        source.check(max_tokens=9)
    assert "\n" not in str(refused.value)


def test_a_stated_format_is_read_even_beside_others(tmp_path, tokenizer):
    path = json_lines(tmp_path / "c.jsonl", {"messages": TWO_TURNS, "text": "it is"})
    source = ChatDataset("chats", path, tokenizer, split_column=None, form="text")
    source.check(max_tokens=9)
    assert next(learnt(source)) == "<s> it is </s>"


def test_rated_answers_have_tokens_and_a_label(tmp_path, tokenizer):
    """Whichever way yes and no are written."""
    rows = [{"prompt": "it is", "completion": text, "label": label} for text, label in (("good", True), ("bad", False))]
    path = json_lines(tmp_path / "a.jsonl", *rows)
    source = ChatDataset("answers", path, tokenizer, split_column=None, form="completion", label_column="label")
    source.check(max_tokens=9)
    read = source.read([1, 0])
    assert tuple(read) == source.keys == ("tokens", "prompt_length", "mask", "label")
    assert (read["label"], read["mask"]) == ([0.0, 1.0], [[1, 1], [1, 1]])


@pytest.mark.parametrize(
    ("labels", "says"),
    [
        (["good", "bad"], r"^answers row 0 label: got 'good', expected true or false, or 1 or 0"),
        ([1, 2], r"^answers row 1 label: got 2, expected true or false"),
        ([True, None], r"^answers row 1 label: got None, expected true or false"),
        ([True, True], r"^answers.label: got 'True in all rows', expected both good and bad answers"),
    ],
)
def test_a_label_that_is_not_yes_or_no_is_refused(tmp_path, tokenizer, labels, says):
    rows = [{"prompt": "it is", "completion": "good", "label": label} for label in labels]
    path = json_lines(tmp_path / "a.jsonl", *rows)
    source = ChatDataset("answers", path, tokenizer, split_column=None, form="completion", label_column="label")
    with pytest.raises(InvalidInput, match=says):
        source.check(max_tokens=9)
