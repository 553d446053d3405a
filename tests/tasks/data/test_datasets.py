"""Datasets: what a row becomes, and that bad data is refused in one line that names field, value and remedy."""

import pickle

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from prefect_rlhf.errors.errors import InvalidInput
from prefect_rlhf.tasks.data.datasets import PreferenceDataset, PromptDataset
from tests.tasks.small_tokenizer import ids, save_small_tokenizer

pytestmark = pytest.mark.quick

CHAT = [{"role": "user", "content": "what is it"}]


def write(path, **columns):
    pq.write_table(pa.table(columns), path)
    return str(path)


def test_plain_prompts_become_tokens_in_the_requested_order(tmp_path, tokenizer):
    path = write(tmp_path / "p.parquet", prompt=["a film", "good", "bad film"], split=["train", "test", "train"])
    source = PromptDataset("prompts", path, tokenizer)
    source.check(max_tokens=3)
    assert (len(source), source.num_items) == (2, 2)
    assert source.read([1, 0]) == {"prompt_tokens": [ids("<s> bad film"), ids("<s> a film")]}


def test_a_folder_of_files_is_one_dataset(tmp_path, tokenizer):
    write(tmp_path / "0.parquet", prompt=["good"])
    write(tmp_path / "1.parquet", prompt=["bad"])
    source = PromptDataset("prompts", str(tmp_path), tokenizer, split_column=None)
    assert source.read([0, 1])["prompt_tokens"] == [ids("<s> good"), ids("<s> bad")]


def test_text_with_the_chat_template_is_a_users_turn(tmp_path, tokenizer):
    path = write(tmp_path / "p.parquet", prompt=["what is it"])
    source = PromptDataset("prompts", path, tokenizer, split_column=None, chat_template=True)
    assert source.read([0])["prompt_tokens"] == [ids("user what is it assistant")]


def test_messages_go_through_the_chat_template(tmp_path, tokenizer):
    chat = [*CHAT, {"role": "assistant", "content": "a film"}, {"role": "user", "content": "good"}]
    path = write(tmp_path / "p.parquet", prompt=[chat])
    source = PromptDataset("prompts", path, tokenizer, split_column=None)
    source.check(max_tokens=20)
    assert source.read([0])["prompt_tokens"] == [ids("user what is it assistant a film user good assistant")]


def test_a_pair_is_two_rows_chosen_first(tmp_path, tokenizer):
    path = write(tmp_path / "p.parquet", prompt=["it is"], chosen=["good"], rejected=["a bad film"])
    source = PreferenceDataset("pairs", path, tokenizer, split_column=None)
    source.check(max_tokens=6)
    assert (len(source), source.num_items) == (2, 1)
    rows = source.read([0, 1])
    assert rows["tokens"] == [ids("<s> it is good"), ids("<s> it is a bad film")]
    assert rows["prompt_length"] == [3, 3]


def test_without_a_prompt_the_first_token_counts_as_prompt(tmp_path, tokenizer):
    """Nothing precedes it, so no model says how likely it is."""
    path = write(tmp_path / "p.parquet", chosen=["good"], rejected=["bad"])
    source = PreferenceDataset("pairs", path, tokenizer, split_column=None, prompt_column=None)
    assert source.read([1]) == {"tokens": [ids("<s> bad")], "prompt_length": [1]}


@pytest.mark.parametrize(
    ("settings", "end"), [({"chat_template": True}, True), ({"end_of_text": True}, True), ({}, False)]
)
def test_answers_end_in_a_chat_or_on_request(tmp_path, tokenizer, settings, end):
    path = write(tmp_path / "p.parquet", prompt=["it is"], chosen=["good"], rejected=["bad"])
    source = PreferenceDataset("pairs", path, tokenizer, split_column=None, **settings)
    assert (source.read([0])["tokens"][0][-1] == ids("</s>")[0]) is end


def test_a_source_is_pickled_as_its_settings(tmp_path, tokenizer):
    path = write(tmp_path / "p.parquet", prompt=["a film"] * 1000)
    source = PromptDataset("prompts", path, tokenizer, split_column=None)
    before = len(pickle.dumps(source))
    source.check(max_tokens=3)
    assert len(pickle.dumps(source)) == before
    assert pickle.loads(pickle.dumps(source)).read([7]) == source.read([7])


GOOD_PROMPTS = {"prompt": ["a film", "good"], "split": ["train", "train"]}
GOOD_PAIRS = {"prompt": ["", "it"], "chosen": ["good", "best"], "rejected": ["bad", "bad"]}

# what is wrong: (columns of the file, what the error says, settings of the dataset)
BAD_PROMPTS = {
    "missing file": (None, r"prompts.path: got .*, expected an existing file of Parquet"),
    "not parquet": ("text", r"prompts.path: got .*, expected Parquet that can be read"),
    "empty folder": ("folder", r"prompts.path: got .*, expected a folder with files of Parquet, JSON or CSV"),
    "missing column": (
        {"text": ["a"], "split": ["train"]},
        r"prompts.prompt_column: got 'prompt', .* it has text, split",
        {"split_column": "split"},
    ),
    "numbers for text": ({"prompt": [1]}, r"prompts.prompt: got 'int64', expected strings"),
    "lists of text": ({"prompt": [["a"]]}, r"prompts.prompt: got 'list<.*>', expected strings, or"),
    "no rows": ({"prompt": pa.array([], pa.string())}, r"prompts.path: .* at least one row"),
    "missing split column": (
        {"prompt": ["a"]},
        r"prompts.split_column: got 'split', expected a column of",
        {"split_column": "split"},
    ),
    "unknown split": (
        GOOD_PROMPTS,
        r"prompts.split: got 'tset', expected a split of .*: train",
        {"split_column": "split", "split": "tset"},
    ),
    "null prompt": ({"prompt": ["a", None]}, r"prompts row 1: got None, expected a prompt"),
    "blank prompt": ({"prompt": ["  ", "a"]}, r"prompts row 0: got '  ', expected a prompt"),
    "empty chat": ({"prompt": [CHAT, []]}, r"prompts row 1: got \[\], expected a prompt"),
    "blank message": ({"prompt": [[{"role": "user", "content": ""}]]}, r"prompts row 0: got"),
    "too long": ({"prompt": ["a", "a a a a a a"]}, r"prompts row 1: got '7 tokens', expected at most 6"),
    "no tokenizer": (
        GOOD_PROMPTS,
        r"tokenizer: got 'nowhere', expected a folder with tokenizer",
        {"tokenizer": "nowhere"},
    ),
    "broken tokenizer": (
        GOOD_PROMPTS,
        r"tokenizer: got .*broken', expected a tokenizer that",
        {"tokenizer": "broken"},
    ),
    "no template": (
        GOOD_PROMPTS,
        r"prompts.chat_template: .* has a chat template",
        {"tokenizer": "plain", "chat_template": True},
    ),
    "templates without a default": (
        GOOD_PROMPTS,
        r"prompts.chat_template: got .*named', expected a tokenizer .* named default, not only rag, tool_use; or",
        {"tokenizer": "named", "chat_template": True},
    ),
}
BAD_PAIRS = {
    "missing answers": ({"rejected": None}, r"pairs.rejected_column: got 'rejected', .* it has prompt, chosen"),
    "numbers for answers": ({"chosen": [1, 2]}, r"pairs.chosen: got 'int64', expected strings"),
    "null answer": ({"rejected": ["bad", None]}, r"pairs row 1 rejected: got None, expected an answer"),
    "blank answer": ({"chosen": ["", "a"]}, r"pairs row 0 chosen: got '', expected an answer"),
    "equal answers": ({"chosen": ["good", "bad"]}, r"pairs row 1: got 'bad', expected two answers that differ"),
    "null prompt": ({"prompt": ["", None]}, r"pairs row 1: got None, expected a prompt"),
    "too long": ({"rejected": ["a", "a a a a a a"]}, r"pairs row 1: got '8 tokens', expected at most 6"),
}


def make(path, columns, settings, tmp_path, tokenizer):
    """Write what a case describes; the settings with the tokenizer's folder in full."""
    if columns == "text":
        path.write_text("prompt\na film\n")
    elif columns == "folder":
        path.mkdir()
    elif columns is not None:
        write(path, **columns)
    folder = settings.get("tokenizer", tokenizer)
    if folder == "plain":
        folder = save_small_tokenizer(tmp_path / "plain", template=None)
    if folder == "named":  # transformers refuses a chat without tools, so its end would not be found
        folder = save_small_tokenizer(tmp_path / "named", template={"rag": "{{ messages }}", "tool_use": "{{ tools }}"})
    if folder == "broken":
        folder = str(tmp_path / "broken")
        (tmp_path / "broken").mkdir()
        (tmp_path / "broken" / "tokenizer.json").write_text("{")
    return {"split_column": None} | settings | {"path": str(path), "tokenizer": folder}


def assert_refused(source, says):
    with pytest.raises(InvalidInput, match=says) as refused:
        source.check(max_tokens=6)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize("case", BAD_PROMPTS)
def test_bad_prompts_are_refused_in_one_line(tmp_path, tokenizer, case):
    columns, says, *settings = BAD_PROMPTS[case]
    made = make(tmp_path / "d.parquet", columns, *(settings or [{}]), tmp_path, tokenizer)
    assert_refused(PromptDataset("prompts", **made), says)


@pytest.mark.parametrize("case", BAD_PAIRS)
def test_bad_pairs_are_refused_in_one_line(tmp_path, tokenizer, case):
    changes, says = BAD_PAIRS[case]
    columns = {name: values for name, values in (GOOD_PAIRS | changes).items() if values is not None}
    assert_refused(PreferenceDataset("pairs", **make(tmp_path / "d.parquet", columns, {}, tmp_path, tokenizer)), says)
