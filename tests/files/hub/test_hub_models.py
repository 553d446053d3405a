"""Models by their names on the Hub: what is downloaded, when, and which commit it is."""

import json
import logging

import pytest
from huggingface_hub.utils import enable_progress_bars

from prefect_rlhf.engines.files.huggingface import read_model_spec
from prefect_rlhf.errors.errors import InvalidInput
from prefect_rlhf.files.hub import progress
from prefect_rlhf.files.hub.session import WISH, asking
from prefect_rlhf.files.storage.inputs import model_folder, pinned_model
from prefect_rlhf.tasks.data.tokenizer import load_tokenizer
from prefect_rlhf.tasks.model_shape import model_shape


def silent(line):
    """Take a line and show nothing."""


def test_a_model_of_the_hub_is_described_as_its_folder(tiny, tiny_folder):
    local, named = (read_model_spec("actor", path, "lm") for path in (str(tiny_folder), "acme/tiny"))
    assert named.shape == local.shape
    assert load_tokenizer("acme/tiny")("what is it") == load_tokenizer(str(tiny_folder))("what is it")


def test_only_the_files_that_a_run_reads_are_downloaded(hub, tiny, tiny_folder):
    folder = model_folder("acme/tiny", "actor.path", say=silent)
    assert {file.name for file in folder.iterdir()} == {file.name for file in tiny_folder.iterdir()}
    fetched = {one.rpartition("/")[2] for one in hub.asked_for("GET", "/resolve/")}
    assert fetched == {file.name for file in tiny_folder.iterdir()}


def test_a_sharded_model_has_the_files_in_its_index(hub, tiny_folder):
    weights = (tiny_folder / "model.safetensors").read_bytes()
    index = {"weight_map": {"a": "part-a.safetensors", "b": "part-b.safetensors"}}
    files = {"config.json": b"{}", "model.safetensors.index.json": json.dumps(index).encode()}
    parts = {f"part-{letter}.safetensors": weights for letter in "abc"}
    hub.add("acme/parts", files | parts)
    folder = model_folder("acme/parts", "actor.path", say=silent)
    assert {file.name for file in folder.glob("*.safetensors")} == {"part-a.safetensors", "part-b.safetensors"}


def test_a_single_file_beside_an_index_is_read_as_transformers_reads_it(hub, tiny_folder):
    """Of two models in a repository, transformers reads the single file."""
    index = {"weight_map": {"a": "part-a.safetensors"}}
    files = {file.name: file.read_bytes() for file in tiny_folder.iterdir()}
    parts = {"model.safetensors.index.json": json.dumps(index).encode(), "part-a.safetensors": b"older"}
    hub.add("acme/both", files | parts)
    folder = model_folder("acme/both", "actor.path", say=silent)
    assert {file.name for file in folder.glob("*.safetensors")} == {"model.safetensors"}
    assert read_model_spec("actor", "acme/both", "lm").shape == read_model_spec("actor", tiny_folder, "lm").shape


def test_templates_for_tools_are_downloaded_too(hub, tiny_folder):
    """A tokenizer with several chat templates has all but one in a folder of their own."""
    files = {file.name: file.read_bytes() for file in tiny_folder.iterdir()}
    templates = {"chat_template.jinja": b"plain", "additional_chat_templates/tool_use.jinja": b"with tools"}
    hub.add("acme/tools", files | templates | {"other/tool_use.jinja": b"of another"})
    tokenizer = load_tokenizer("acme/tools")
    assert tokenizer.chat_template == {"default": "plain", "tool_use": "with tools"}
    hub.add("acme/inner", {f"small/{name}": content for name, content in (files | templates).items()})
    assert load_tokenizer("hf://acme/inner/small").chat_template == tokenizer.chat_template


def test_a_what_if_downloads_config_json_alone(hub, tiny, tiny_folder):
    assert model_shape("actor", "acme/tiny") == model_shape("actor", str(tiny_folder))
    assert [one.rpartition("/")[2] for one in hub.asked_for("GET", "/resolve/")] == ["config.json"]


def test_a_model_that_plans_know_by_name_is_not_requested(hub):
    assert model_shape("actor", "Qwen/Qwen2.5-0.5B-Instruct").num_layers == 24
    assert hub.requests == []


def test_a_copy_is_used_again_without_a_request(hub, tiny):
    at = pinned_model("acme/tiny", "actor.path", {}, silent)
    assert at == f"hf://acme/tiny@{tiny}"
    first = model_folder(at, "actor.path", say=silent)
    hub.requests.clear()
    assert model_folder(at, "critic.path", say=silent) == first
    assert hub.requests == []


def test_a_branch_is_resolved_once_and_a_known_commit_is_kept(hub, tiny, tiny_folder):
    commits, lines = {}, []
    for role in ("actor", "ref"):
        pinned_model("acme/tiny", f"{role}.path", commits, lines.append)
    assert lines == [f"actor.path: acme/tiny@main is at commit {tiny}"]
    newer = hub.add("acme/tiny", tiny_folder)
    assert pinned_model("acme/tiny", "actor.path", commits, lines.append) == f"hf://acme/tiny@{tiny}"
    assert pinned_model("acme/tiny", "actor.path", {}, lines.append) == f"hf://acme/tiny@{newer}"


@pytest.mark.parametrize("text", ["acme/tiny@v1", "hf://acme/tiny@v1", "acme/tiny@refs/pr/1", "acme/tiny@{commit:.8}"])
def test_a_revision_follows_the_at(hub, tiny, tiny_folder, text):
    older = hub.add("acme/tiny", {"config.json": b"{}"}, branch="v1")
    hub.repositories["acme/tiny"].branches["refs/pr/1"] = older
    hub.add("acme/tiny", tiny_folder)
    at = pinned_model(text.format(commit=older), "actor.path", {}, silent)
    assert at == f"hf://acme/tiny@{older}"


def test_a_model_may_be_in_a_folder_of_its_repository(hub, tiny_folder):
    hub.add("acme/many", {f"small/{file.name}": file.read_bytes() for file in tiny_folder.iterdir()})
    assert read_model_spec("actor", "hf://acme/many/small", "lm").shape == model_shape("actor", str(tiny_folder))


def test_a_folder_of_the_same_name_wins_and_a_line_says_so(hub, tiny, tiny_folder, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "acme").mkdir()
    (tmp_path / "acme" / "tiny").symlink_to(tiny_folder)
    lines = []
    assert pinned_model("acme/tiny", "actor.path", {}, lines.append) == "acme/tiny"
    assert lines == ["actor.path: acme/tiny is a folder here; a model of this name on the Hub would be hf://acme/tiny"]
    assert model_folder("acme/tiny", "actor.path").samefile(tiny_folder)
    assert hub.requests == []


@pytest.mark.parametrize("path", ["models/smollm2", "runs/ppo/actor", "./acme/tiny", "~/tiny", "/acme/tiny", "tiny"])
def test_an_impossible_hub_name_sends_no_request(hub, path):
    assert pinned_model(path, "actor.path", {}, pytest.fail) == path
    assert str(model_folder(path, "actor.path")) == path.removeprefix("./")
    assert hub.requests == []


def test_a_token_is_sent_to_the_hub_and_never_shown(hub, tiny, tiny_folder, monkeypatch, caplog, capfd):
    hub.add("acme/secret", tiny_folder, private=True)
    monkeypatch.setenv("HF_TOKEN", "hf_right")
    lines = []
    with caplog.at_level(logging.DEBUG):
        folder = model_folder("acme/secret", "actor.path", say=lines.append)
    assert hub.seen_tokens == {"hf_right"}
    shown = [*lines, caplog.text, *capfd.readouterr(), str(folder)]
    shown += [file.read_text() for file in folder.parents[1].rglob("*.json")]
    assert not any("hf_right" in text for text in shown)


def test_a_long_download_says_how_large_it_is_and_how_far_it_got(hub, tiny, monkeypatch):
    monkeypatch.setattr(progress, "LONG_BYTES", 100_000)
    monkeypatch.setattr(progress, "EVERY_SECONDS", 0.0)
    lines = []
    model_folder("acme/tiny", "actor.path", say=lines.append)
    begin, *between, end = lines
    assert begin.startswith("actor.path: downloads acme/tiny into ")
    assert begin.endswith(": 347 kB in 1 files")
    assert between[-1] == "actor.path: acme/tiny: 347 kB of 347 kB"
    assert end.startswith("actor.path: downloaded acme/tiny in ")


def test_a_terminal_has_a_bar_and_no_lines_between(hub, tiny, monkeypatch, tmp_path):
    monkeypatch.setattr(progress, "LONG_BYTES", 100_000)
    monkeypatch.setattr(progress, "EVERY_SECONDS", 0.0)
    enable_progress_bars()  # as in a new process: transformers may have switched them off in this one
    lines = []
    with (tmp_path / "screen").open("w+") as stream:
        stream.isatty = lambda: True
        with progress.bars_on(stream):
            model_folder("acme/tiny", "actor.path", say=lines.append)
        stream.seek(0)
        assert "actor.path: acme/tiny: 100%" in stream.read()
    assert len(lines) == 2


def test_a_rank_asks_although_its_libraries_may_not(hub, tiny, monkeypatch):
    """HF_HUB_OFFLINE is 1 in ranks; a rank on another machine downloads what this one has."""
    from huggingface_hub import constants, model_info
    from huggingface_hub.errors import OfflineModeIsEnabled

    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv(WISH, "")
    assert (model_folder("acme/tiny", "actor.path", say=silent) / "model.safetensors").is_file()
    with pytest.raises(OfflineModeIsEnabled):
        model_info("acme/tiny")
    monkeypatch.setenv(WISH, "1")
    with pytest.raises(InvalidInput, match="because HF_HUB_OFFLINE is set"), asking():
        model_folder("acme/other", "actor.path")


@pytest.mark.parametrize("own", [[], ["scalar_head.safetensors"]])
def test_of_an_adapter_its_files_alone_are_downloaded(hub, own):
    """A scalar head beside that of a language model is a file of ours, which peft does not write."""
    needed = ["adapter_config.json", "adapter_model.safetensors", *own]
    hub.add("acme/sft", dict.fromkeys((*needed, "README.md", "optimizer.pt"), b"x"))
    folder = model_folder("acme/sft", "actor.adapter.path", "adapter")
    assert {file.name for file in folder.iterdir()} == set(needed)
    hub.add("acme/tiny-base", {"config.json": b"{}"})
    with pytest.raises(InvalidInput, match="an adapter .LoRA. with adapter_config.json, which is not among its files"):
        model_folder("acme/tiny-base", "actor.adapter.path", "adapter")
