"""Whatever a file is that somebody else wrote, reading it neither hangs nor ends in a traceback."""

import os
from pathlib import Path

import pytest

from prefect_rlhf.engines.files.checkpoint_files import read_index
from prefect_rlhf.engines.files.model_config import read_config
from prefect_rlhf.engines.sampling.chats.answer_end import end_tokens
from prefect_rlhf.errors.errors import InvalidInput
from prefect_rlhf.files.foreign_file import finished_lines, parse_json, read_content
from prefect_rlhf.files.yaml_text import read_yaml
from prefect_rlhf.flows.training.run_folder import read_result
from prefect_rlhf.placement.cost.times.profile import Profile
from prefect_rlhf.tasks.checkpoints.folders import newest_checkpoint, read_checkpoint
from prefect_rlhf.tasks.data.stored.files import find_files
from prefect_rlhf.tasks.data.stored.json_files import read_json as read_rows
from prefect_rlhf.tasks.running.journal import Journal

pytestmark = pytest.mark.quick

DEEP = "[" * 100_000


def pipe(path):
    os.mkfifo(path)
    return path


def endless(path):
    path.symlink_to("/dev/zero")
    return path


def deep(path):
    path.write_text(DEEP + "\n")
    return path


def no_object(path):
    path.write_text("[1, 2]\n")
    return path


READERS = {
    "a checkpoint": ("checkpoint.json", lambda file: read_checkpoint(file.parent)),
    "a run's newest checkpoint": ("checkpoint.json", lambda file: newest_checkpoint(file.parents[3])),
    "an index of a shard": ("shard-00000.json", lambda file: read_index(file, "actor")),
    "a plan": ("plan.yaml", lambda file: read_yaml("plan", file)),
    "a profile": ("profile.json", Profile.read),
    "JSON lines": ("rows.jsonl", lambda file: read_rows("prompts", [str(file)])),
    "a dataset": ("rows.jsonl", lambda file: list(map(Path, find_files("prompts", str(file), "train").files))),
    "a model": ("config.json", lambda file: read_config(file.parent, "actor")),
    "tokens that end": ("generation_config.json", lambda file: end_tokens(str(file.parent))),
    "a result": ("result.json", lambda file: read_result(file.parent)),
    "metrics of an earlier run": (
        "metrics.jsonl",
        lambda file: Journal(file.parent / "own").go_on_after(1, file.parent),
    ),
}
NOT_READ = {"a dataset", "a plan"}  # by these: what is in the file is another test's
NONE_THERE = {"tokens that end", "a result"}  # a pipe is as good as no file


@pytest.mark.parametrize("reader", READERS)
@pytest.mark.parametrize("made", [pipe, endless, deep, no_object])
def test_a_foreign_file_is_refused_in_one_line(tmp_path, reader, made):
    name, read = READERS[reader]
    folder = tmp_path / "runs" / "amber" / "checkpoints" / "step-000002"
    folder.mkdir(parents=True)
    file = made(folder / name)
    if made in (deep, no_object) and reader in NOT_READ or made in (pipe, endless) and reader in NONE_THERE:
        return
    with pytest.raises(InvalidInput) as refused:
        read(file)
    assert "\n" not in str(refused.value) and len(str(refused.value)) < 1000


def test_a_truncated_line_is_ignored(tmp_path):
    (tmp_path / "lines.jsonl").write_text('{"step": 1}\n{"step": 2}\n{"st')
    assert list(finished_lines("resume_from", tmp_path / "lines.jsonl")) == [{"step": 1}, {"step": 2}]
    assert list(finished_lines("resume_from", tmp_path / "nowhere.jsonl")) == []


def test_a_file_larger_than_it_may_be_is_an_error(tmp_path):
    (tmp_path / "file").write_bytes(bytes(10))
    assert read_content(tmp_path / "file", 10) == bytes(10)
    with pytest.raises(OSError, match="more than 9 bytes"):
        read_content(tmp_path / "file", 9)


def test_deep_nesting_is_a_value_error():
    with pytest.raises(ValueError, match="nested too deeply"):
        parse_json(DEEP)
