"""Rows as TRL, verl and OpenRLHF have them are read as they are; what cannot be meant is refused in one line."""

import pytest

from prefect_rlhf.errors.errors import InvalidInput
from prefect_rlhf.tasks.data.datasets import PreferenceDataset, PromptDataset
from tests.tasks.data.stored import ask, json_lines, parquet, say
from tests.tasks.small_tokenizer import ids

pytestmark = pytest.mark.quick


def test_verl_prompts(tmp_path, tokenizer):
    """Messages as prompt; the truth within a struct."""
    row = {
        "data_source": "sums",
        "prompt": [ask("what is it")],
        "ability": "math",
        "reward_model": {"style": "rule", "ground_truth": "5"},
        "extra_info": {"index": 3, "split": "train"},
    }
    path = parquet(tmp_path / "train.parquet", **{name: [value] for name, value in row.items()})
    paths = {"ground_truth": "reward_model.ground_truth"}
    source = PromptDataset("prompts", path, tokenizer, split_column=None, column_paths=paths)
    source.check(max_tokens=9)
    assert source.read([0])["prompt_tokens"] == [ids("user what is it assistant")]
    keywords = {name: source.read_column(name, [0])[0] for name in ("data_source", "ground_truth", "extra_info")}
    assert keywords == {"data_source": "sums", "ground_truth": "5", "extra_info": {"index": 3, "split": "train"}}


def test_openrlhf_lines(tmp_path, tokenizer):
    """`input_key` and `label_key` are names of columns here."""
    path = json_lines(tmp_path / "train.jsonl", {"input": "a film", "label": "good"}, {"input": "it", "label": "bad"})
    source = PromptDataset("prompts", path, tokenizer, split_column=None, prompt_column="input")
    source.check(max_tokens=5)
    assert source.read([1])["prompt_tokens"] == [ids("<s> it")]
    assert source.read_column("label", [0, 1]) == ["good", "bad"]


@pytest.mark.parametrize("prompt", ["what is it", [ask("what is it")]], ids=["text", "messages"])
def test_trl_prompts(tmp_path, tokenizer, prompt):
    rows = {"prompt": prompt, "solution": "a film"}
    for path in (
        json_lines(tmp_path / "p.jsonl", rows),
        parquet(tmp_path / "p.parquet", prompt=[prompt], solution=["a film"]),
    ):
        source = PromptDataset("prompts", path, tokenizer, split_column=None, chat_template=True)
        source.check(max_tokens=9)
        assert source.read([0])["prompt_tokens"] == [ids("user what is it assistant")]
        assert source.read_column("solution", [0]) == ["a film"]


# a pair as TRL documents it, or as data sets in its collections have it: the columns of a row
PAIRS = {
    "explicit prompt": {"prompt": [ask("what is it")], "chosen": [say("good")], "rejected": [say("bad")]},
    "explicit text": {"prompt": "what is it", "chosen": [say("good")], "rejected": [say("bad")]},
    "implicit prompt": {"chosen": [ask("what is it"), say("good")], "rejected": [ask("what is it"), say("bad")]},
    "prompt in both": {
        "prompt": "what is it",
        "chosen": [ask("what is it"), say("good")],
        "rejected": [ask("what is it"), say("bad")],
    },
    "messages in both": {
        "prompt": [ask("what is it")],
        "chosen": [ask("what is it"), say("good")],
        "rejected": [ask("what is it"), say("bad")],
    },
    "plain text in a chat": {"prompt": "what is it", "chosen": "good", "rejected": "bad"},
}


@pytest.mark.parametrize("case", PAIRS)
def test_trl_pairs(tmp_path, tokenizer, case):
    """Whichever way a pair is written, it becomes the same tokens."""
    row = PAIRS[case]
    columns = {name: [value] for name, value in row.items()}
    for path in (json_lines(tmp_path / "p.jsonl", row), parquet(tmp_path / "p.parquet", **columns)):
        source = PreferenceDataset("pairs", path, tokenizer, split_column=None, chat_template=True)
        source.check(max_tokens=9)
        prompt = ids("user what is it assistant")
        assert source.read([0, 1])["tokens"] == [prompt + ids("good </s>"), prompt + ids("bad </s>")]
        assert source.read([0, 1])["prompt_length"] == [len(prompt)] * 2


def test_a_shared_answer_is_part_of_the_prompt(tmp_path, tokenizer):
    """A conversation of several turns, of which the last differs."""
    before = [ask("what is it"), say("a film"), ask("good")]
    row = {"chosen": [*before, say("good")], "rejected": [*before, say("bad")]}
    path = json_lines(tmp_path / "p.jsonl", row)
    source = PreferenceDataset("pairs", path, tokenizer, split_column=None)
    source.check(max_tokens=20)
    assert source.read([1])["tokens"] == [ids("user what is it assistant a film user good assistant bad </s>")]


BAD_PAIRS = {
    "messages and text": ({"chosen": [ask("a"), say("b")], "rejected": "c"}, r"^pairs.rejected: .* as in chosen"),
    "text and messages": ({"prompt": "a", "chosen": "c", "rejected": [say("b")]}, r"^pairs.rejected: .*strings"),
    "nothing shared": ({"chosen": [say("a")], "rejected": [say("b")]}, r"^pairs row 0: .*a prompt: messages"),
    "equal": ({"chosen": [ask("a"), say("b")], "rejected": [ask("a"), say("b")]}, r"^pairs row 0: .*differ"),
    "two turns apart": (
        {"chosen": [ask("a"), say("b")], "rejected": [ask("it"), say("b")]},
        r"^pairs row 0: got 'user, assistant', expected a single message of the assistant after",
    ),
    "no answer": ({"chosen": [ask("a")], "rejected": [ask("a"), say("b")]}, r"^pairs row 0: got 'no message', exp"),
    "an answer of the user": ({"chosen": [ask("a"), ask("b")], "rejected": [ask("a"), say("b")]}, r"got 'user',"),
    "a blank answer": (
        {"chosen": [ask("a"), say(" ")], "rejected": [ask("a"), say("b")]},
        r"^pairs row 0 chosen: got ' ', expected an answer",
    ),
    "no chat": ({"prompt": "a", "chosen": None, "rejected": [say("b")]}, r"^pairs.chosen: got 'null', expected str"),
    "an empty chat": ({"prompt": "a", "chosen": [], "rejected": [say("b")]}, r"^pairs row 0: got \[\], .*both sides"),
    "another prompt": (
        {"prompt": "film", "chosen": [ask("a"), say("b")], "rejected": [ask("a"), say("c")]},
        r"^pairs row 0: got 'film', expected a message that both sides .* empty prompt_column",
    ),
    "no prompt of strings": ({"chosen": "a", "rejected": "b"}, r"^pairs row 0: got 'a', expected texts that begin"),
}  # fmt: skip


@pytest.mark.parametrize("case", BAD_PAIRS)
def test_an_impossible_pair_is_refused_in_one_line(tmp_path, tokenizer, case):
    row, says = BAD_PAIRS[case]
    source = PreferenceDataset("pairs", json_lines(tmp_path / "p.jsonl", row), tokenizer, split_column=None)
    with pytest.raises(InvalidInput, match=says) as refused:
        source.check(max_tokens=9)
    assert "\n" not in str(refused.value)


ANSWERED = [ask("what is it"), say("a film"), ask("good"), say("bad")]


def test_an_answered_chat_is_refused_or_stripped_as_asked(tmp_path, tokenizer):
    """Only the messages after the last question are, and chats that end with one stay as they are."""
    path = json_lines(tmp_path / "p.jsonl", {"prompt": ANSWERED}, {"prompt": [ask("it")]})
    with pytest.raises(
        InvalidInput, match=r"^prompts row 0: .*drop the assistant.s last message, or set last_answer to strip"
    ):
        PromptDataset("prompts", path, tokenizer, split_column=None).check(max_tokens=20)
    source = PromptDataset("prompts", path, tokenizer, split_column=None, last_answer="strip")
    source.check(max_tokens=20)
    asked = ids("user what is it assistant a film user good assistant")
    assert source.read([1, 0])["prompt_tokens"] == [ids("user it assistant"), asked]
    assert source.read_column("prompt", [0]) == [ANSWERED]


def test_a_chat_of_only_answers_becomes_empty(tmp_path, tokenizer):
    path = parquet(tmp_path / "p.parquet", prompt=[[say("a film")]])
    source = PromptDataset("prompts", path, tokenizer, split_column=None, last_answer="strip")
    with pytest.raises(InvalidInput, match=r"^prompts row 0: got \[\], expected a prompt that is not empty"):
        source.check(max_tokens=20)
