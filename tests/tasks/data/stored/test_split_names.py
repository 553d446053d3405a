"""A folder whose files are named after splits, as on the Hub, is read as one of them: no test row is trained on."""

import pyarrow as pa
import pytest

from prefect_rlhf.errors.errors import InvalidInput
from prefect_rlhf.tasks.data.stored.stored_rows import StoredRows
from tests.tasks.data.stored import json_lines, parquet

pytestmark = pytest.mark.quick

# names as on the Hub, in its own Parquet branch, and as people name files: the rows of train, and of test
NAMED = {
    "shards": (
        "data/train-00000-of-00002.parquet",
        "data/train-00001-of-00002.parquet",
        "data/test-00000-of-00001.parquet",
    ),
    "shards with a hash": (
        "train-00000-of-00002-4746b8785c874cc7.parquet",
        "train-00001-of-00002-ab.parquet",
        "test-00000-of-00001-cd.parquet",
    ),
    "the Hub's own": ("main/train/0000.parquet", "main/train/0001.parquet", "main/test/0000.parquet"),
    "words": ("math_train_a.jsonl", "math_train_b.jsonl", "math-test.jsonl"),
    "folders": ("train/a.jsonl", "train/b.jsonl", "eval/a.jsonl"),
}


def write(folder, names):
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        rows = {"text": [name]}
        if name.endswith("jsonl"):
            json_lines(folder / name, {"text": name})
        else:
            parquet(folder / name, **rows)
    return str(folder)


@pytest.mark.parametrize("case", NAMED)
@pytest.mark.parametrize("split_column", [None, "split"])
def test_a_folder_of_several_splits_is_read_as_one(tmp_path, case, split_column):
    """It needs no column of splits, and the log says which rows were left out."""
    *train, test = NAMED[case]
    path = write(tmp_path, NAMED[case])
    rows = StoredRows("data", path, split_column, "train")
    assert rows.read("text") == train
    assert rows.remark == "; only its split train"
    assert StoredRows("data", path, split_column, "test").read("text") == [test]


def test_splits_of_other_names_are_told_apart(tmp_path):
    path = write(tmp_path, [f"data/{name}-00000-of-00001.parquet" for name in ("train_sft", "train_gen", "test_sft")])
    assert StoredRows("data", path, None, "train_sft").read("text") == ["data/train_sft-00000-of-00001.parquet"]
    with pytest.raises(InvalidInput) as refused:
        StoredRows("data", path, None, "train").read("text")
    splits, pattern = "test_sft, train_gen, train_sft", f"for all files, a pattern such as {path}/**/*.parquet"
    assert str(refused.value) == f"data.split: got 'train', expected a split of {path}: {splits}; {pattern}"
    assert len(StoredRows("data", f"{path}/**/*.parquet")) == 3


@pytest.mark.parametrize("train", ["train-00000-of-00001.parquet", "train/0000.parquet", "train-00000-of-00001.jsonl"])
def test_a_repository_of_several_datasets_is_refused_with_the_folder_of_each(tmp_path, train):
    """GSM8K has its problems twice, in main/ and in socratic/."""
    path = write(tmp_path, [f"{name}/{train}" for name in ("main", "socratic")])
    with pytest.raises(InvalidInput) as refused:
        StoredRows("data", path).read("text")
    expected = f"one of its datasets, as {path}/main or {path}/socratic, which both have {train}"
    pattern = f"for all files, a pattern such as {path}/**/*.{train.rpartition('.')[2]}"
    assert str(refused.value) == f"data.path: got '{path}', expected {expected}; {pattern}"
    assert StoredRows("data", f"{path}/main").read("text") == [f"main/{train}"]


def test_a_whole_copy_of_a_repository_is_refused_with_a_pattern_that_reads_one_split(tmp_path):
    names = [f"main/{split}-0000{number}-of-00002.parquet" for split in ("train", "test") for number in (0, 1)]
    path = write(tmp_path, names)
    (tmp_path / "README.md").write_text("# GSM8K")
    pattern = f"{path}/main/test-*.parquet"
    with pytest.raises(InvalidInput) as refused:
        StoredRows("data", path).read("text")
    assert str(refused.value).endswith(f"expected a folder with only .parquet files, or a pattern such as {pattern}")
    assert StoredRows("data", pattern).read("text") == names[2:]


def test_files_of_one_split_are_read_together(tmp_path):
    for number, names in enumerate(
        (["train-0.jsonl", "more.jsonl"], ["part-00000-of-00002.parquet", "part-00001-of-00002.parquet"])
    ):
        rows = StoredRows("data", write(tmp_path / str(number), names))
        assert (sorted(rows.read("text")), rows.remark) == (sorted(names), "")


def test_a_file_without_a_split_beside_others_is_refused(tmp_path):
    path = write(tmp_path, ["train.jsonl", "test.jsonl", "more.jsonl"])
    says = (
        r"^data.path: got '.*more.jsonl', expected the name of a split in each file's name, as test and train in others"
    )
    with pytest.raises(InvalidInput, match=says):
        StoredRows("data", path).read("text")


def test_a_column_of_splits_beside_files_of_splits_is_refused(tmp_path):
    path = write(tmp_path, NAMED["words"])
    with pytest.raises(InvalidInput, match=r"^data.split_column: 'fold' is not used: the files' names of"):
        StoredRows("data", path, "fold").read("text")


def test_folders_named_after_a_value_are_a_column(tmp_path):
    """As Hive names them."""
    for split in ("train", "test"):
        (tmp_path / f"fold={split}").mkdir()
        parquet(tmp_path / f"fold={split}" / "0.parquet", text=pa.array([split]))
    assert StoredRows("data", str(tmp_path), "fold", "test").read("text") == ["test"]
    assert len(StoredRows("data", str(tmp_path))) == 2
