"""Prompts that are too long are refused, left out or cut, as asked for, and a system prompt comes before them."""

import pickle

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from prefect_rlhf.blocks.dataset import Prompts
from prefect_rlhf.errors.errors import InvalidInput
from prefect_rlhf.tasks.data.datasets import PromptDataset
from tests.tasks.small_tokenizer import ids, save_small_tokenizer

LONG = ["a film", "what is the best film", "good", "it is the best film"]


@pytest.fixture
def prompts(tmp_path, tokenizer):
    def make(texts=LONG, **settings):
        pq.write_table(pa.table({"prompt": texts, "number": range(len(texts))}), tmp_path / "p.parquet")
        return PromptDataset("prompts", str(tmp_path / "p.parquet"), tokenizer, split_column=None, **settings)

    return make


def test_a_long_prompt_is_refused_by_default(prompts):
    with pytest.raises(InvalidInput, match=r"prompts row 1: got '6 tokens', expected at most 4, its max_prompt_length"):
        prompts(max_prompt_length=4).check(max_tokens=64)


def test_dropped_prompts_are_logged_and_columns_stay_aligned(prompts):
    source = prompts(max_prompt_length=4, overlong_prompts="drop")
    checked = source.check(max_tokens=64)
    assert checked.longest == 3  # of those that are read
    there = pickle.loads(pickle.dumps(source))  # as ranks get it
    for one in (source, there):
        assert (len(one), one.num_items) == (2, 2)
        assert one.read([1, 0])["prompt_tokens"] == [ids("<s> good"), ids("<s> a film")]
        assert one.read_column("number", [1, 0]) == [2, 0]
    assert checked.remarks == ("prompts: 2 of 4 prompts are longer than 4 tokens and left out",)


@pytest.mark.parametrize("overlong", ["drop", "keep_end", "keep_start"])
def test_no_line_is_logged_if_every_prompt_fits(prompts, overlong):
    assert prompts(max_prompt_length=40, overlong_prompts=overlong).check(max_tokens=64).remarks == ()


@pytest.mark.parametrize(("keep", "text"), [("keep_end", "is the best film"), ("keep_start", "<s> what is the")])
def test_prompts_are_cut_at_the_requested_end(prompts, keep, text):
    source = prompts(max_prompt_length=4, overlong_prompts=keep)
    checked = source.check(max_tokens=64)
    assert checked.longest == 4
    assert source.read([1, 2])["prompt_tokens"] == [ids(text), ids("<s> good")]
    assert checked.remarks == (f"prompts: 2 of 4 prompts are longer than 4 tokens and cut to their {keep[5:]}",)


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        (
            {"max_prompt_length": 1, "overlong_prompts": "drop"},
            "got 1, expected at least 2, the shortest prompt: all 4",
        ),
        (
            {"max_prompt_length": 65},
            "prompts.max_prompt_length: got 65, expected at most 64: the context has no room for more",
        ),
        ({"system_prompt": "good"}, "plain text has no system message"),
    ],
)
def test_contradictory_settings_are_refused(prompts, settings, says):
    with pytest.raises(InvalidInput, match=says) as error:
        prompts(**settings).check(max_tokens=64)
    assert "\n" not in str(error.value)


def test_a_setting_for_long_prompts_needs_a_limit():
    with pytest.raises(InvalidInput, match="overlong_prompts: 'drop' is not used: no prompt is overlong"):
        Prompts(path="a", overlong_prompts="drop")


def test_a_system_prompt_precedes_a_chat_and_the_template_is_logged(prompts):
    source = prompts(texts=["what is it"], chat_template=True, system_prompt="the best film")
    source.check(max_tokens=64)
    assert source.read([0])["prompt_tokens"] == [ids("<unk> the best film user what is it assistant")]
    (line,) = source.remarks()
    assert "renders a prompt as 'system the best film user {prompt} assistant'" in line


def test_a_templates_own_system_prompt_is_logged(tmp_path, prompts):
    own = "{% if messages[0].role != 'system' %}system good film {% endif %}"
    rest = "{% for m in messages %}{{ m.role }} {{ m.content }} {% endfor %}"
    folder = save_small_tokenizer(tmp_path / "own", own + rest)
    source = PromptDataset("prompts", prompts(texts=["it"]).path, folder, split_column=None, chat_template=True)
    assert "as 'system good film user {prompt} '" in source.remarks()[0]


def test_a_second_system_message_is_refused(prompts):
    chat = [{"role": "system", "content": "good"}, {"role": "user", "content": "what"}]
    with pytest.raises(InvalidInput, match="row 0: got 'a system message', expected a chat without"):
        prompts(texts=[chat], system_prompt="bad").check(max_tokens=64)
