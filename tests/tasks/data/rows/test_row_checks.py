"""Checks of many rows: in chunks, with rows numbered as in the file, and a line now and then on how far they are."""

import pytest

from prefect_rlhf.errors.errors import InvalidInput
from prefect_rlhf.tasks.data.chats import ChatDataset
from prefect_rlhf.tasks.data.datasets import PreferenceDataset, PromptDataset
from prefect_rlhf.tasks.data.rows import row_checks
from prefect_rlhf.tasks.data.tokenizer import load_tokenizer
from tests.tasks.data.stored import parquet

pytestmark = pytest.mark.quick

CHUNK = 3
BAD = 7  # in the third chunk


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch):
    monkeypatch.setattr(row_checks, "CHUNK", CHUNK)


def rows(word):
    """Rows of every kind of dataset, ten each, with a word at a place in the third chunk."""
    said = ["good film"] * BAD + [word] + ["good film"] * (9 - BAD)
    return {
        "prompts": {"prompt": said},
        "pairs": {"prompt": ["what is it"] * 10, "chosen": said, "rejected": ["bad"] * 10},
        "chats": {"prompt": ["what is it"] * 10, "completion": said},
    }


KINDS = {"prompts": PromptDataset, "pairs": PreferenceDataset, "chats": ChatDataset}


@pytest.fixture
def source(tmp_path, tokenizer):
    def make(kind, word="it", **settings):
        path = parquet(tmp_path / "rows.parquet", **rows(word)[kind])
        return KINDS[kind]("rows", path, tokenizer, split_column=None, **settings)

    return make


@pytest.mark.parametrize("kind", KINDS)
def test_measured_lengths_are_those_of_the_rows_that_are_read(source, kind):
    dataset = source(kind)
    key = "prompt_tokens" if kind == "prompts" else "tokens"
    read = dataset.read(range(len(dataset)))[key]
    assert list(dataset.check(max_tokens=99).lengths) == [len(tokens) for tokens in read]


@pytest.mark.parametrize("kind", KINDS)
def test_a_bad_row_is_reported_by_its_number_in_the_file(source, kind):
    with pytest.raises(InvalidInput, match=f"rows row {BAD}"):
        source(kind, word="").check(max_tokens=99)
    with pytest.raises(InvalidInput, match=f"rows row {BAD}: got '.* tokens', expected at most"):
        source(kind, word="good " * 20).check(max_tokens=15)
    with pytest.raises(InvalidInput, match=f"rows row {BAD}: got 'token 13', expected tokens below 13"):
        source(kind, word="best").check(max_tokens=99, vocabulary=13)


@pytest.mark.parametrize("kind", KINDS)
def test_items_that_a_run_does_not_read_are_not_checked(source, kind):
    dataset = source(kind, word="")
    checked = dataset.check(max_tokens=99, items=[0, 2, 4, 9])
    assert len(checked.lengths) == (8 if kind == "pairs" else 4)
    with pytest.raises(InvalidInput, match=f"rows row {BAD}"):
        dataset.check(max_tokens=99, items=[0, 2, 4, BAD])


def test_a_long_check_reports_its_progress(source, monkeypatch):
    monkeypatch.setattr(row_checks, "QUIET_SECONDS", -1.0)
    lines = []
    source("prompts", say=lines.append).check(max_tokens=99)
    assert [line.split(" in ")[0] for line in lines] == [f"rows: {done} of 10 items checked" for done in (3, 6, 9)]
    assert all("s left" in line for line in lines)


def test_texts_get_the_same_tokens_together_as_alone(source, tokenizer):
    """With the special token that begins a text, and without it inside a chat."""
    dataset, plain = source("prompts"), load_tokenizer(tokenizer)
    assert dataset.read(range(10))["prompt_tokens"] == [
        plain(text)["input_ids"] for text in rows("it")["prompts"]["prompt"]
    ]
    chats = source("prompts", chat_template=True)
    asked = [[{"role": "user", "content": text}] for text in rows("it")["prompts"]["prompt"]]
    alone = [plain.apply_chat_template(chat, add_generation_prompt=True)["input_ids"] for chat in asked]
    assert chats.read(range(10))["prompt_tokens"] == alone
