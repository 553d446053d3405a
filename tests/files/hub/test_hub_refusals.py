"""What the Hub, the network or the cache refuses is a line with what would be right."""

import json
import os
from pathlib import Path

import pytest
from huggingface_hub import constants

from prefect_rlhf.errors.errors import InvalidInput
from prefect_rlhf.files.hub import session
from prefect_rlhf.files.storage.inputs import dataset_path, model_folder, pinned_model
from tests.support.small_disk import small_disk

ADAPTER = {
    "adapter_config.json": json.dumps({"base_model_name_or_path": "acme/tiny"}).encode(),
    "adapter_model.safetensors": b"x",
}
ROOT = pytest.mark.skipif(os.geteuid() != 0, reason="only root can mount a file system")


def refusal(text: str) -> str:
    """Return the line about a model that cannot be read."""
    with pytest.raises(InvalidInput) as error:
        model_folder(pinned_model(text, "actor.path", {}, lambda line: None), "actor.path")
    line = str(error.value)
    assert "\n" not in line
    assert line.startswith("actor.path: got '")
    return line


@pytest.fixture(autouse=True)
def no_pauses(monkeypatch):
    """Pauses between the repeated requests of huggingface_hub are no part of what is tested."""
    monkeypatch.setattr("time.sleep", lambda seconds: None)


def test_a_name_that_does_not_exist_may_be_a_folder_or_a_model(hub):
    line = refusal("acme/none")
    assert f"expected a folder that exists in {Path.cwd()}, or the name of a model on {hub.address}" in line
    assert "if it is private, `hf auth login`, or HF_TOKEN" in line


def test_a_hub_path_is_not_a_folder(hub):
    assert "expected a model that exists" in refusal("hf://acme/none")


def test_a_gated_model_names_its_page_and_the_login(hub, tiny_folder):
    hub.add("acme/gated", tiny_folder, gated=True)
    expected = f"accept its terms at {hub.address}/acme/gated, then `hf auth login`, or HF_TOKEN in the environment"
    assert expected in refusal("acme/gated")


def test_a_revision_that_does_not_exist_names_the_page_of_branches(hub, tiny):
    line = refusal("acme/tiny@v7")
    assert f"a branch, a tag or a commit of acme/tiny after the @ ({hub.address}/acme/tiny/tree" in line


def test_a_token_that_the_hub_does_not_know_is_named_without_its_value(hub, tiny, monkeypatch):
    monkeypatch.setenv("HF_TOKEN", "hf_wrong")
    line = refusal("acme/tiny")
    assert "expected a valid token of the Hub, or no token: `hf auth login`, or HF_TOKEN" in line
    assert "hf_wrong" not in line


@pytest.mark.parametrize(
    ("text", "command"),
    [("acme/tiny", "hf download acme/tiny"), ("acme/tiny@v1", "hf download acme/tiny --revision v1")],
)
def test_offline_the_line_has_the_command_that_downloads(hub, tiny, monkeypatch, text, command):
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setenv(session.WISH, "1")
    line = refusal(text)
    assert line.endswith(f"because HF_HUB_OFFLINE is set; with a network: {command}")
    assert hub.requests == []


def test_offline_a_model_that_was_downloaded_is_read(hub, tiny, monkeypatch):
    """As `hf download` leaves it, all files of a branch are in the cache."""
    from huggingface_hub import snapshot_download

    snapshot_download("acme/tiny")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setenv(session.WISH, "1")
    hub.requests.clear()
    folder = model_folder(pinned_model("acme/tiny", "actor.path", {}, lambda line: None), "actor.path")
    assert (folder / "model.safetensors").is_file()
    assert hub.requests == []


def test_offline_a_model_with_only_its_config_is_incomplete(hub, tiny, monkeypatch):
    model_folder("acme/tiny", "actor.path", "config")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setenv(session.WISH, "1")
    assert f"hf download acme/tiny --revision {tiny}" in refusal("acme/tiny")


def test_a_hub_that_is_away_is_named_with_the_command(hub, tiny, monkeypatch):
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    line = refusal("acme/tiny")
    assert "a Hub that answers at http://127.0.0.1:9 (ConnectError" in line
    assert line.endswith(
        "or a folder that exists, or a model in the Hub's cache on this machine; with a network: hf download acme/tiny"
    )


def test_a_hub_that_never_answers_is_given_up(hub, tiny, monkeypatch):
    monkeypatch.setattr(session, "ANSWER_SECONDS", 0.2)
    hub.silent.add("/api/models/acme/tiny")
    assert "a Hub that answers" in refusal("acme/tiny")
    hub.silent = {f"/api/models/acme/tiny/tree/{tiny}"}
    assert "a Hub that answers" in refusal("acme/tiny")


def test_a_failing_hub_is_named(hub, tiny):
    hub.status = 500
    assert "a Hub that answers" in refusal("acme/tiny")


def test_a_server_without_hub_api_is_named(hub, tiny):
    hub.nonsense = b"[]"
    assert f"the address of a Hub in HF_ENDPOINT; {hub.address} does not answer like a Hub" in refusal("acme/tiny")
    hub.nonsense = b"<html>"
    assert f"the address of a Hub in HF_ENDPOINT; {hub.address} does not answer like a Hub" in refusal("acme/tiny")


def test_a_download_that_breaks_off_names_the_file_and_how_far_it_got(hub, tiny):
    hub.cut_after["model.safetensors"] = 100_000
    line = refusal("acme/tiny")
    assert "of 347 kB had arrived, without all of model.safetensors" in line


def test_an_interrupted_download_goes_on_with_the_files_that_are_missing(hub, tiny):
    hub.cut_after["model.safetensors"] = 100_000
    refusal("acme/tiny")
    hub.cut_after.clear()
    hub.requests.clear()
    folder = model_folder(f"hf://acme/tiny@{tiny}", "actor.path")
    assert (folder / "model.safetensors").stat().st_size > 100_000
    assert {one.rpartition("/")[2] for one in hub.asked_for("GET", "/resolve/")} == {"model.safetensors"}


@ROOT
def test_a_disk_without_room_is_refused_before_the_download(hub, tiny, tmp_path, monkeypatch):
    with small_disk(tmp_path / "small", 1 << 18) as folder:
        monkeypatch.setattr(constants, "HF_HUB_CACHE", str(folder / "hub"))
        line = refusal("acme/tiny")
        assert f"expected a disk with room for 347 kB more; {folder}/hub has " in line
        assert hub.asked_for("GET", "model.safetensors") == []


@ROOT
def test_a_disk_that_is_full_meanwhile_is_named(hub, tiny, tmp_path, monkeypatch):
    monkeypatch.setattr("prefect_rlhf.files.hub.snapshots._check_room", lambda *_: None)
    with small_disk(tmp_path / "small", 1 << 18) as folder:
        monkeypatch.setattr(constants, "HF_HUB_CACHE", str(folder / "hub"))
        line = refusal("acme/tiny")
        assert f"expected room for acme/tiny in {folder}/hub (HF_HOME names another place); " in line
        assert "without all of model.safetensors" in line


def test_a_cache_that_cannot_be_written_is_named(hub, tiny, tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "file" / "hub"))
    expected = f"expected a cache that this user can write: {tmp_path}/file/hub, or another place in HF_HOME"
    assert expected in refusal("acme/tiny")


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({"tiny-q4.gguf": b"x"}, "a model with config.json, not with .gguf alone"),
        ({"config.json": b"{}", "pytorch_model.bin": b"x"}, "weights as safetensors, not with .bin alone"),
        ({"README.md": b"x"}, "a model with config.json, which is not among its files"),
        (
            ADAPTER,
            "not an adapter (LoRA): it has only the difference to acme/tiny, "
            "so give that as path and this as adapter.path",
        ),
        ({"config.json": b"{}", "adapter_config.json": b"[]"}, "it has only the difference to another model"),
    ],
)
def test_a_repository_without_safetensors_lists_its_files(hub, files, expected):
    hub.add("acme/other", files)
    assert expected in refusal("acme/other")
    assert hub.asked_for("GET", ".bin") == hub.asked_for("GET", ".gguf") == []


@pytest.mark.parametrize("text", ["hf://", "hf://tiny", "hf://acme/tiny@", "hf://acme/tiny/../x", "hf://datasets/rows"])
def test_a_malformed_path_shows_the_form(hub, text):
    assert "expected hf://OWNER/NAME@REVISION or hf://datasets/OWNER/NAME@REVISION/FILE" in refusal(text)
    assert hub.requests == []


def test_a_missing_hub_dataset_gives_one_line(hub):
    with pytest.raises(InvalidInput, match="prompts.path: got .*expected a dataset that exists"):
        dataset_path("hf://datasets/acme/none/train.parquet", "prompts.path")
