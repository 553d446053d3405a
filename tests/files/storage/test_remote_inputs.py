"""Models and datasets in a bucket are read as those on disk are."""

import shutil

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from prefect_rlhf.engines.files.huggingface import read_model_spec
from prefect_rlhf.errors.errors import InvalidInput
from prefect_rlhf.tasks.data.stored.stored_rows import StoredRows
from prefect_rlhf.tasks.data.tokenizer import load_tokenizer
from prefect_rlhf.tasks.model_shape import model_shape
from tests.support.object_stores import names, put
from tests.support.tiny import make_model


@pytest.fixture
def rows(tmp_path):
    """A folder of two Parquet files and one of JSON lines."""
    folder = tmp_path / "rows"
    (folder / "more").mkdir(parents=True)
    pq.write_table(pa.table({"prompt": ["a", "b"]}), folder / "train-0.parquet")
    pq.write_table(pa.table({"prompt": ["c"]}), folder / "train-1.parquet")
    pq.write_table(pa.table({"prompt": ["d"]}), folder / "more" / "train-2.parquet")
    (folder / "lines.jsonl").write_text('{"prompt": "e"}\n')
    return folder


@pytest.mark.parametrize(
    "path", ["train-0.parquet", "lines.jsonl", "more", "train-*.parquet", "**/*.parquet", "train-[01].parquet"]
)
def test_remote_rows_match_the_same_path_on_disk(s3, rows, path):
    put(f"{s3}/rows", rows)
    remote, local = (StoredRows("prompts", f"{place}/{path}") for place in (f"{s3}/rows", rows))
    assert remote.read("prompt") == local.read("prompt") != []


def test_a_pattern_without_a_match_names_the_remote_path(s3, rows):
    put(f"{s3}/rows", rows)
    with pytest.raises(InvalidInput, match=r"prompts.path: got 's3://bucket/rows/test-\*.parquet', expected a pattern"):
        StoredRows("prompts", f"{s3}/rows/test-*.parquet").read("prompt")


def test_a_model_is_described_as_on_disk_and_keeps_its_remote_path(s3, tmp_path):
    folder = make_model(tmp_path / "model")
    put(f"{s3}/models/tiny", tmp_path / "model")
    local, remote = (read_model_spec("actor", path, "lm") for path in (folder, f"{s3}/models/tiny"))
    assert remote.path == f"{s3}/models/tiny"
    assert remote.shape == local.shape
    assert load_tokenizer(remote.path)("what is it") == load_tokenizer(folder)("what is it")


def test_a_what_if_copies_the_config_and_no_weights(s3, tmp_path, cache):
    folder = make_model(tmp_path / "model")
    put(f"{s3}/models/tiny", tmp_path / "model")
    assert model_shape("actor", f"{s3}/models/tiny") == model_shape("actor", folder)
    assert [path.name for path in cache.rglob("tiny/*")] == ["config.json"]


def test_a_model_that_is_not_whole_is_refused_as_on_disk(s3, tmp_path):
    make_model(tmp_path / "model")
    (tmp_path / "model" / "model.safetensors").unlink()
    put(f"{s3}/models/tiny", tmp_path / "model")
    assert "models/tiny/config.json" in names(s3)
    shutil.rmtree(tmp_path / "model")
    with pytest.raises(InvalidInput, match="actor.path: got 'no file model.safetensors"):
        read_model_spec("actor", f"{s3}/models/tiny", "lm")
