"""The last lines of a completed run."""

import shlex
from pathlib import Path

import pytest

from prefect_rlhf.errors.errors import InvalidInput
from prefect_rlhf.flows.commands.chat import generating_folder
from prefect_rlhf.flows.commands.next_steps import PAGE, next_steps
from prefect_rlhf.flows.commands.run import RunFlags, words_of_new
from tests.support.tiny import make_model

PROJECT = Path(__file__).parents[3]
COMMAND = ["prefect-rlhf", "run", "ppo", "-p", "actor.path=old", "-p", "steps=2", "-p", "critic.path=older"]


def line(lines, begin):
    return [each.removeprefix(begin) for each in lines if each.startswith(begin)]


def test_the_command_of_the_next_run_sets_each_parameter_once():
    """A model that was trained further replaces the earlier one; a value set twice would be refused."""
    assert line(next_steps(COMMAND, {"actor": "new"}), "train: ") == [
        "prefect-rlhf run ppo -p steps=2 -p critic.path=older -p actor.path=new"
    ]


def test_a_generating_model_gets_a_chat_command_and_a_critic_does_not(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    folders = {role: make_model(tmp_path / "a run" / role, scalar=role == "critic") for role in ("critic", "actor")}
    lines = next_steps(COMMAND, folders)
    assert line(lines, "model: ") == ["a run/critic", "a run/actor"]
    assert line(lines, "chat:  ") == ["prefect-rlhf chat 'a run/actor'"]
    assert line(next_steps(COMMAND, {"critic": folders["critic"]}), "chat:  ") == []


def test_an_adapter_is_trained_further_and_its_merged_model_answers(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    adapter = tmp_path / "run" / "actor"
    adapter.mkdir(parents=True)
    (adapter / "adapter_config.json").write_text('{"base_model_name_or_path": "models/smollm2"}')
    lines = next_steps(COMMAND, {"actor": str(adapter)})
    further = "-p actor.path=old -p steps=2 -p critic.path=older -p actor.adapter.path=run/actor"
    assert line(lines, "train: ") == [f"prefect-rlhf run ppo {further}"]
    assert line(lines, "chat:  ") == []
    with pytest.raises(InvalidInput, match="run/actor is an adapter alone, on models/smollm2; export_merged=true"):
        generating_folder("run/actor")
    make_model(tmp_path / "run" / "actor_merged")
    assert line(next_steps(COMMAND, {"actor": str(adapter)}), "chat:  ") == ["prefect-rlhf chat run/actor_merged"]
    with pytest.raises(InvalidInput, match="expected a whole model, as in run/actor_merged: run/actor is an adapter"):
        generating_folder("run/actor")
    monkeypatch.chdir(adapter)
    with pytest.raises(InvalidInput, match=f"got '.', expected a whole model, as in {adapter}_merged"):
        generating_folder(".")


@pytest.mark.parametrize(("folder", "seen"), [("first", f"../{PAGE}"), ("first/runs", f"../../{PAGE}"), ("", PAGE)])
def test_the_page_is_where_the_person_is(folder, seen, tmp_path, monkeypatch):
    """In a folder of the clone the path works as it stands there."""
    (tmp_path / "docs").mkdir()
    (tmp_path / PAGE).touch()
    (tmp_path / folder).mkdir(parents=True, exist_ok=True)
    monkeypatch.chdir(tmp_path / folder)
    (read,) = line(next_steps(COMMAND, {"actor": "new"}), "read:  ")
    assert read.startswith(f"{seen}: evaluate it") and Path(seen).is_file()


def test_without_a_clone_the_page_has_its_title(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (read,) = line(next_steps(COMMAND, {"actor": "new"}), "read:  ")
    title = (PROJECT / PAGE).read_text().splitlines()[0].removeprefix("# ")
    assert read.startswith(f'"{title}" ({PAGE} of prefect-rlhf): evaluate it')


def test_a_run_that_trained_no_model_has_no_next_step():
    assert next_steps(COMMAND, {}) == []


@pytest.mark.parametrize(
    ("flags", "of_file", "words"),
    [
        (["resume_from=latest", "resume_changes=algo.clip", "steps=4"], {}, "-p steps=4"),
        (["steps=4"], {"resume_from": "latest"}, "-p steps=4 -p resume_from=null"),
        (["resume_from=latest"], {"resume_changes": ["algo.clip"]}, "-p 'resume_changes=[]'"),
    ],
)
def test_the_next_run_begins_with_the_trained_model_and_not_from_the_checkpoint(flags, of_file, words):
    """Whether the command or its file has named the checkpoint."""
    stated = {text.partition("=")[0]: text for text in flags} | of_file
    command = words_of_new(RunFlags("ppo", param=tuple(flags)), stated)
    assert shlex.join(command) == f"prefect-rlhf run ppo {words}"
