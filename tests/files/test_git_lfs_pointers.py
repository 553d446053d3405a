"""A Git LFS pointer in place of data or of a tokenizer is named, with the command that fetches the file."""

import pytest

from prefect_rlhf.errors.errors import InvalidInput
from prefect_rlhf.files.foreign_file import is_pointer, read_json_object
from prefect_rlhf.tasks.data.stored.stored_rows import StoredRows
from prefect_rlhf.tasks.data.tokenizer import load_tokenizer
from tests.tasks.small_tokenizer import save_small_tokenizer

pytestmark = pytest.mark.quick

POINTER = f"version https://git-lfs.github.com/spec/v1\noid sha256:{'6' * 64}\nsize 146946961\n"


@pytest.mark.parametrize("name", ["train.parquet", "train.jsonl", "train.json", "train.csv", "train.jsonl.gz"])
@pytest.mark.parametrize("path", ["file", "folder", "pattern"])
def test_a_pointer_in_place_of_data_is_named(tmp_path, name, path):
    folder = tmp_path / "data"
    folder.mkdir()
    (folder / name).write_text(POINTER)
    place = {"file": folder / name, "folder": folder, "pattern": folder / "train*"}[path]
    with pytest.raises(InvalidInput) as refused:
        StoredRows("prompts", str(place)).read("prompt")
    right = f"the file, not a Git LFS pointer to it: run git lfs pull in {folder}"
    assert (refused.value.field, refused.value.seen, refused.value.expected) == (
        "prompts.path",
        f"{folder / name}",
        right,
    )


def test_a_pointer_in_place_of_a_tokenizer_is_named(tmp_path):
    folder = save_small_tokenizer(tmp_path / "model")
    (tmp_path / "model" / "tokenizer.json").write_text(POINTER)
    with pytest.raises(InvalidInput, match=r"^tokenizer: got '.*tokenizer.json', .*run git lfs pull in .*model$"):
        load_tokenizer(folder)


def test_a_pointer_in_place_of_json_is_named(tmp_path):
    (tmp_path / "config.json").write_text(POINTER)
    with pytest.raises(InvalidInput, match=r"^config: .*it is a Git LFS pointer to it: run git lfs pull"):
        read_json_object("config", tmp_path / "config.json")


@pytest.mark.parametrize(
    "content", ["", POINTER[1:], POINTER + "x" * 1024, '{"version": "https://git-lfs.github.com"}']
)
def test_other_files_are_no_pointers(tmp_path, content):
    (tmp_path / "a").write_text(content)
    assert not is_pointer(tmp_path / "a")
    assert not is_pointer(tmp_path)
