"""Columns of a dataset by row number, as rewards get them: every one, under its name or one that a person gives."""

import pickle
from datetime import datetime, timedelta

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from prefect_rlhf.blocks.dataset import Preferences, Prompts, read_as
from prefect_rlhf.engines.rows import keys_of_calls
from prefect_rlhf.errors.errors import InvalidInput
from prefect_rlhf.flows.training.inputs import open_source
from prefect_rlhf.tasks.data.datasets import PreferenceDataset, PromptDataset
from tests.tasks.data.stored import json_lines, parquet, saved

pytestmark = pytest.mark.quick

COLUMNS = {
    "prompt": ["a film", "good", "bad"],
    "answer": ["7", None, "9"],
    "weight": [0.5, 1.0, None],
    "easy": [True, False, None],
    "reward_model": [{"ground_truth": "x"}, None, {"ground_truth": "z"}],
    "split": ["train", "test", "train"],
}


def every_format(folder):
    table = pa.table(COLUMNS)
    return [
        parquet(folder / "p.parquet", **COLUMNS),
        json_lines(folder / "rows.jsonl", *table.to_pylist()),
        saved(folder / "saved", table),
    ]


def test_columns_are_read_by_row_number(tmp_path, tokenizer):
    """In the order asked for, nulls as None, structs as dicts; the column of splits is none of them."""
    for path in every_format(tmp_path):
        source = PromptDataset("prompts", path, tokenizer)
        source.check(max_tokens=5)
        assert source.columns == ("prompt", "answer", "weight", "easy", "reward_model")
        kinds = {"prompt": "text", "answer": "text", "weight": "number", "easy": "number", "reward_model": "other"}
        assert source.column_kinds == kinds
        assert source.read_column("answer", [1, 0, 1]) == ["9", "7", "9"]
        assert source.read_column("weight", [0, 1]) == [0.5, None]
        assert source.read_column("easy", [0]) == [True]
        assert source.read_column("reward_model", [1]) == [{"ground_truth": "z"}]
        assert pickle.loads(pickle.dumps(source)).read_column("answer", [1]) == ["9"]


def test_the_prompt_is_a_column_whatever_its_name(tmp_path, tokenizer):
    """Rewards and plays read it as `prompt`, and not as the model does, who reads the template too."""
    table = pa.table({"question": COLUMNS["prompt"], "answer": COLUMNS["answer"]})
    path = json_lines(tmp_path / "rows.jsonl", *table.to_pylist())
    source = PromptDataset("prompts", path, tokenizer, split_column=None, prompt_column="question")
    assert source.columns == ("prompt", "question", "answer")
    assert source.read_column("prompt", [1, 0]) == source.read_column("question", [1, 0])
    assert source.read_column("prompt", [0]) == COLUMNS["prompt"][:1]


def test_a_field_of_a_struct_gets_a_name(tmp_path, tokenizer):
    """Beside the column that it is in."""
    for path in every_format(tmp_path):
        parameter = Prompts(path=path, columns={"ground_truth": "reward_model.ground_truth", "label": "answer"})
        source = open_source("prompts", parameter, tokenizer)
        source.check(max_tokens=5)
        assert source.columns[-3:] == ("reward_model", "ground_truth", "label")
        assert source.column_kinds["ground_truth"] == "text"
        assert source.read_column("ground_truth", [1, 0]) == ["z", "x"]
        assert source.read_column("label", [0]) == source.read_column("answer", [0]) == ["7"]


def test_a_fields_name_may_have_dots(tmp_path, tokenizer):
    """`Skywork/Skywork-OR1-RL-Data` names fields after models."""
    info = {"difficulty": {"R1-Distill-Qwen-1.5B": 7, "R1": {"5B": 8}}, "difficulty.R1": 9}
    row = {"prompt": "a film", "extra_info": info}
    names = {"a": "extra_info.difficulty.R1-Distill-Qwen-1.5B", "b": "extra_info.difficulty.R1.5B"}
    path = parquet(tmp_path / "p.parquet", **{name: [value] for name, value in row.items()})
    source = open_source("prompts", Prompts(path=path, split_column=None, columns={"a": names["a"]}), tokenizer)
    assert source.read_column("a", [0]) == [7]
    with pytest.raises(
        InvalidInput, match=r"^prompts.columns.b: .*, expected a field of 'extra_info.difficulty.R1' in"
    ):
        open_source("prompts", Prompts(path=path, split_column=None, columns=names), tokenizer).check(9)


def test_times_have_microseconds(tmp_path, tokenizer):
    """pandas writes nanoseconds, and Python's times have none. A reward should not need pandas for them."""
    moment, day = 1_704_067_200_123_456_789, datetime(2024, 1, 1, 0, 0, 0, 123456)
    times = pa.array([moment], pa.timestamp("ns"))
    inside = pa.array([[{"t": moment, "d": 1789}]], pa.list_(pa.struct({"t": times.type, "d": pa.duration("ns")})))
    path = parquet(tmp_path / "p.parquet", prompt=["a film"], t=times, inside=inside)
    source = PromptDataset("prompts", path, tokenizer, split_column=None)
    assert source.read_column("t", [0]) == source.read_column("t", range(1)) == [day]
    assert source.read_column("inside", [0]) == [[{"t": day, "d": timedelta(microseconds=1)}]]


def test_a_value_that_python_lacks_is_refused_in_one_line(tmp_path, tokenizer):
    far = pa.array([2**62], pa.timestamp("us"))
    source = PromptDataset(
        "prompts", parquet(tmp_path / "p.parquet", prompt=["a"], t=far), tokenizer, split_column=None
    )
    with pytest.raises(InvalidInput, match=r"^a column: got 'timestamp\[us\]', expected values that Python has"):
        source.read_column("t", [0])


def test_columns_of_other_writers_do_not_make_a_file_unreadable(tmp_path, tokenizer):
    """Parquet's own types of identifiers and JSON, as DuckDB writes them, without Arrow's schema beside them."""
    table = pa.table(
        {"prompt": ["a film"], "id": pa.array([bytes(16)], pa.uuid()), "info": pa.array(['{"a": 1}'], pa.json_())}
    )
    pq.write_table(table, tmp_path / "p.parquet", store_schema=False)
    source = PromptDataset("prompts", str(tmp_path / "p.parquet"), tokenizer, split_column=None)
    source.check(max_tokens=5)
    assert source.read_column("info", [0]) == ['{"a": 1}']


def test_a_pairs_two_rows_have_its_columns(tmp_path, tokenizer):
    path = parquet(tmp_path / "p.parquet", chosen=["good", "bad"], rejected=["bad", "film"], margin=[1, 2])
    source = PreferenceDataset("pairs", path, tokenizer, split_column=None, prompt_column=None)
    assert source.read_column("margin", [0, 1, 2, 3]) == [1, 1, 2, 2]
    assert source.columns == ("chosen", "rejected", "margin")


def test_a_column_named_like_a_calls_key_is_read_under_another_name(tmp_path, tokenizer):
    """Those of a run's rollouts, say."""
    names = {name: [1.0] for name in keys_of_calls()}
    path = parquet(tmp_path / "p.parquet", prompt=["a film"], **names)
    source = PromptDataset("prompts", path, tokenizer, split_column=None, column_paths={"earlier": "scores"})
    source.check(max_tokens=5)
    assert source.columns == ("prompt", "earlier")
    assert source.read_column("earlier", [0]) == [1.0]
    with pytest.raises(InvalidInput, match=r"^prompts.columns: got 'scores', expected one of prompt, earlier, in "):
        source.read_column("scores", [0])


BAD = [
    ({"mask": "answer"}, r"^prompts.columns: got 'mask', expected another name: calls make tokens, prompt_tokens"),
    ({"truth": "truth"}, r"^prompts.columns.truth: got 'truth', .* it has prompt, answer, weight"),
    (
        {"truth": "reward_model.answer"},
        r"^prompts.columns.truth: got 'reward_model.answer', expected a field of 'reward_model' in .*has ground_truth",
    ),
    ({"truth": "answer.x"}, r"^prompts.columns.truth: got 'answer.x', expected a field of 'answer' in .*; it is str"),
]


@pytest.mark.parametrize(("columns", "says"), BAD, ids=[*map(str, range(len(BAD)))])
def test_a_name_for_a_missing_column_is_refused_in_one_line(tmp_path, tokenizer, columns, says):
    for path in every_format(tmp_path):
        with pytest.raises(InvalidInput, match=says) as refused:
            PromptDataset("prompts", path, tokenizer, column_paths=columns).check(max_tokens=5)
        assert "\n" not in str(refused.value)


def test_a_run_resumes_if_columns_are_read_as_before():
    """What is said of a dataset differs with them; settings at their defaults are not said."""
    plain = ""
    assert read_as(Prompts(path="a")) == read_as(Prompts(path="b")) == plain
    named = Prompts(path="a", columns={"b": "x.y", "a": "z"})
    assert read_as(named) == read_as(Prompts(path="a", columns={"a": "z", "b": "x.y"})) != plain
    assert read_as(Prompts(path="a", last_answer="strip")) != plain
    assert read_as(Prompts(path="reasoning_gym:a?seed=1")) != read_as(Prompts(path="reasoning_gym:a?seed=2"))


def test_a_graph_knows_its_datasets_columns():
    for value in (Prompts(path="p"), Preferences(path="p")):
        assert value.to_spec("rows", 3, ("answer",)).columns == ("answer",)
        assert value.to_spec("rows", 3, ("answer",)) != value.to_spec("rows", 3)
