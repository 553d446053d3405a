"""Datasets on the Hub are read as those on disk are, at one commit."""

import logging

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from huggingface_hub import constants

from prefect_rlhf.errors.errors import InvalidInput
from prefect_rlhf.files.storage.inputs import pinned_dataset
from prefect_rlhf.tasks.data.stored.stored_rows import StoredRows
from tests.support.hub_stand_in import in_this_process, stand_in


@pytest.fixture
def hub(tmp_path):
    with stand_in() as hub, in_this_process(hub, tmp_path / "hf"):
        yield hub


@pytest.fixture
def rows(hub, tmp_path):
    """A folder of two Parquet files and one of JSON lines, which are a dataset on the Hub too."""
    folder = tmp_path / "rows"
    (folder / "more").mkdir(parents=True)
    pq.write_table(pa.table({"prompt": ["a", "b"]}), folder / "train-0.parquet")
    pq.write_table(pa.table({"prompt": ["c"]}), folder / "train-1.parquet")
    pq.write_table(pa.table({"prompt": ["d"]}), folder / "more" / "train-2.parquet")
    (folder / "lines.jsonl").write_text('{"prompt": "e"}\n')
    (folder / "README.md").write_text("rows")
    (folder / "rows.py").write_text("raise SystemExit")
    hub.add("datasets/acme/rows", folder)
    return folder


@pytest.mark.parametrize(
    "path", ["train-0.parquet", "lines.jsonl", "more", "train-*.parquet", "**/*.parquet", "train-[01].parquet"]
)
def test_rows_on_the_hub_equal_the_same_files_on_disk(hub, rows, path):
    named, local = (StoredRows("prompts", f"{place}/{path}") for place in ("hf://datasets/acme/rows", rows))
    assert named.read("prompt") == local.read("prompt") != []
    assert hub.asked_for("GET", "rows.py") == hub.asked_for("GET", "README") == []


def test_only_files_that_the_path_names_are_downloaded(hub, rows):
    StoredRows("prompts", "hf://datasets/acme/rows/train-*.parquet").read("prompt")
    assert {one.rpartition("/")[2] for one in hub.asked_for("GET", "/resolve/")} == {
        ".gitattributes",
        "train-0.parquet",
        "train-1.parquet",
    }


def test_a_dataset_is_read_at_its_recorded_commit(hub, rows, tmp_path):
    path = pinned_dataset("hf://datasets/acme/rows@main/lines.jsonl", "prompts.path", {}, lambda line: None)
    hub.add("datasets/acme/rows", {"lines.jsonl": b'{"prompt": "newer"}\n'})
    assert StoredRows("prompts", path).read("prompt") == ["e"]
    assert StoredRows("prompts", "hf://datasets/acme/rows/lines.jsonl").read("prompt") == ["newer"]


def test_a_model_repository_may_have_rows(hub):
    hub.add("acme/tiny", {"rows.jsonl": b'{"prompt": "f"}\n'})
    assert StoredRows("prompts", "hf://acme/tiny/rows.jsonl").read("prompt") == ["f"]


@pytest.mark.parametrize("path", ["hf://datasets/acme/rows", "hf://datasets/acme/rows/none.parquet", "acme/rows"])
def test_a_dataset_without_a_file_is_refused_with_a_list_of_its_files(hub, rows, path):
    with pytest.raises(InvalidInput) as error:
        StoredRows("prompts", path).read("prompt")
    assert str(error.value).startswith(f"prompts.path: got '{path}', expected ")
    assert "hf://datasets/acme/rows/lines.jsonl, hf://datasets/acme/rows/more/train-2.parquet" in str(error.value)


@pytest.mark.parametrize("path", ["acme/none", "data/none.jsonl", "none.parquet"])
def test_an_unknown_path_is_refused_as_for_local_files(hub, path):
    with pytest.raises(
        InvalidInput, match=f"prompts.path: got '{path}', expected an existing file of Parquet, JSON or CSV"
    ):
        StoredRows("prompts", path).read("prompt")
    assert hub.asked_for("GET", "none.jsonl") == []


def test_an_uncached_dataset_offline_is_refused_with_the_download_command(hub, rows, monkeypatch):
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setenv("RLHF_HUB_OFFLINE", "1")
    with pytest.raises(InvalidInput, match="hf download acme/rows --repo-type dataset --revision v1"):
        StoredRows("prompts", "hf://datasets/acme/rows@v1/lines.jsonl").read("prompt")


def test_a_gated_dataset_names_its_page(hub):
    hub.add("datasets/acme/gated", {"rows.jsonl": b"{}"}, gated=True)
    with pytest.raises(InvalidInput, match=f"accept its terms at {hub.address}/datasets/acme/gated, then"):
        StoredRows("prompts", "hf://datasets/acme/gated/rows.jsonl").read("prompt")


def test_a_private_dataset_is_read_with_the_token(hub, monkeypatch, caplog):
    hub.add("datasets/acme/own", {"rows.jsonl": b'{"prompt": "g"}\n'}, private=True)
    monkeypatch.setenv("HF_TOKEN", "hf_right")
    with caplog.at_level(logging.DEBUG):
        assert StoredRows("prompts", "hf://datasets/acme/own/rows.jsonl").read("prompt") == ["g"]
    assert "hf_right" not in caplog.text
