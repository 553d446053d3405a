"""The form of a run is read once, at the edge; behind it a run is made of values."""

import ast
from dataclasses import replace
from pathlib import Path

import pytest

from prefect_rlhf.errors.errors import InvalidInput
from prefect_rlhf.files.remote_path import local_path
from prefect_rlhf.flows.forms.options import RunOptions
from prefect_rlhf.flows.ppo import ppo
from prefect_rlhf.flows.training.spec.place import Resume, RunPlace, read_place
from prefect_rlhf.flows.training.spec.replanning import Say, Switch
from prefect_rlhf.flows.training.spec.run_spec import AskedRun, read_spec

TRAINING = Path(__file__).parents[4] / "flows" / "training"


@pytest.mark.parametrize("file", sorted(TRAINING.rglob("*.py")), ids=lambda file: str(file.relative_to(TRAINING)))
def test_only_the_room_of_the_spec_reads_the_form(file):
    if file.parent.name == "spec":
        return
    names = {node.id for node in ast.walk(ast.parse(file.read_text())) if isinstance(node, ast.Name)}
    assert "RunOptions" not in names


def test_a_runs_place_is_a_folder_or_its_mirror(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert read_spec(RunOptions(output_dir="runs")).place == RunPlace(tmp_path / "runs")
    url = "s3://bucket/runs"
    assert read_place(url) == RunPlace(local_path(url, "output_dir"), url)
    with pytest.raises(InvalidInput, match="output_dir: got 'https://host/runs', expected a folder, or s3"):
        read_spec(RunOptions(output_dir="https://host/runs"))


@pytest.mark.parametrize(
    ("options", "policy"),
    [
        ({}, Say(0.1)),
        ({"replan": "off"}, None),
        ({"replan_gain": 0.2}, Say(0.2)),
        ({"replan": "switch", "replan_every": 30, "replan_gain": 0.2}, Switch(0.2, 30)),
    ],
)
def test_the_reaction_to_a_better_plan_is_a_value(options, policy):
    assert read_spec(RunOptions(**options)).replanning == policy


UNUSED = {
    "replan_every": ({"replan_every": 30}, "replan is say"),
    "replan_gain": ({"replan": "off", "replan_gain": 0.2}, "replan is off"),
    "steps": ({"epochs": 2, "steps": 3}, "epochs sets the number of steps"),
    "keep_checkpoints": ({"keep_checkpoints": 5}, "without checkpoint_every"),
    "resume_changes": ({"resume_changes": ("algo.lr",)}, "only a resumed run"),
    "patience": ({"patience": 2}, "best_metric is not set"),
}


@pytest.mark.parametrize("field", UNUSED)
def test_a_value_without_effect_is_refused_where_the_form_is_read(field):
    options, reason = UNUSED[field]
    with pytest.raises(InvalidInput, match=f"^{field}: .* is not used: {reason}"):
        read_spec(RunOptions(**options))


def test_a_run_that_was_started_again_continues_from_its_own_checkpoint():
    asked = AskedRun(ppo.algorithm, {}, read_spec(RunOptions(resume_from="latest")))
    assert asked.spec.resume == Resume() and not asked.spec.is_restart
    again = asked.restarted(Path("/runs/amber/checkpoints/step-000002"), {"hf://acme/judge": "0f3a"})
    assert again.spec.is_restart and again.commits == {"hf://acme/judge": "0f3a"}
    assert asked.restarted(None, {}) == asked
    assert again.spec == replace(asked.spec, resume=Resume(Path("/runs/amber/checkpoints/step-000002"), is_own=True))
    assert asked.dry().spec == replace(asked.spec, dry_run=True)
