"""Algorithms of the field as a person writes them outside our tree, from the public door alone."""

import ast
import shutil
from pathlib import Path

import pytest

from prefect_rlhf.flows.algorithm.rlhf_flow import find_flow
from prefect_rlhf.flows.commands.cli import main
from tests.support.runs import completed, read_lines
from tests.support.tiny import make_model, make_prompts

EXAMPLES = Path(__file__).parents[2] / "docs" / "examples"
MOST_LINES = 40
REWARD = "def short(row):\n    return -float(len(row['response']))\n"


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """An author's folder, with a model, prompts and a reward."""
    home = tmp_path / "author"
    home.mkdir()
    (home / "my_rewards.py").write_text(REWARD)
    make_model(home / "model")
    make_prompts(home / "prompts.parquet")
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(home)
    return home


def parameters(**more):
    """Of a run of two steps in that folder."""
    algo = {"batch_size": 4, "sampling": {"max_new_tokens": 4}, "optimizer": {"lr": 1e-3}} | more.pop("algo", {})
    common = {"actor": {"path": "model"}, "prompts": {"path": "prompts.parquet"}, "steps": 2, "output_dir": "runs"}
    return common | {"algo": algo} | more


SAPO = parameters(reward={"functions": {"short": {"function": "my_rewards.py:short"}}}, algo={"samples_per_prompt": 2})
DISTILLATION = parameters(ref={"path": "model"})


def trained(flow, given):
    """The metrics of each step of a run, which left the trained model."""
    run_dir = completed(flow, given)
    assert (run_dir / "actor" / "model.safetensors").is_file()
    return read_lines(run_dir / "metrics.jsonl")


@pytest.mark.parametrize("name", ["sapo", "self_distillation", "raft", "online_dpo", "nash_md", "self_play"])
def test_an_algorithm_is_at_most_forty_lines_and_imports_from_the_door_alone(name):
    text = (EXAMPLES / f"{name}.py").read_text()
    modules = {node.module for node in ast.walk(ast.parse(text)) if isinstance(node, ast.ImportFrom)}
    assert modules <= {"prefect_rlhf", "collections.abc", "typing"}
    assert text.count("\n") <= MOST_LINES


@pytest.mark.slow
@pytest.mark.usefixtures("prefect")
@pytest.mark.all  # test_two_turns.py trains from a plain file
def test_self_distillation_runs_from_a_plain_file(folder):
    """The copy is sharper than the policy, so the reverse KL to it is there from the first step."""
    shutil.copy(EXAMPLES / "self_distillation.py", folder)
    steps = trained(find_flow("self_distillation.py:self_distillation"), DISTILLATION)
    assert len(steps) == 2 and all(abs(step["reverse_kl.kl"]) > 1e-4 for step in steps)


@pytest.mark.slow
@pytest.mark.usefixtures("prefect")
@pytest.mark.all
@pytest.mark.parametrize("name", ["raft", "online_dpo"])
def test_what_keeps_some_rows_runs_from_a_plain_file(folder, name):
    """One row of each group, and of each that has a best and a worst a pair."""
    shutil.copy(EXAMPLES / f"{name}.py", folder)
    given = SAPO | ({"ref": {"path": "model"}} if name == "online_dpo" else {})
    steps = trained(find_flow(f"{name}.py:{name}"), given)
    share = "best_first.kept_share" if name == "raft" else "chosen_and_rejected.kept_share"
    assert [step[share] for step in steps] == pytest.approx([0.5, 0.5] if name == "raft" else [1, 1], abs=0.5)
    assert any("actor_train.loss" in step for step in steps)


@pytest.mark.slow
@pytest.mark.usefixtures("prefect")
@pytest.mark.all
@pytest.mark.parametrize(
    ("name", "rival", "metric"),
    [("nash_md", "opponent", "preferred.preference"), ("self_play", "opponent", "wins.win_rate")],
)
def test_a_policy_plays_against_a_model_that_follows_it(folder, name, rival, metric):
    """The rival answers with a new version after each follow; until the first, it is the policy."""
    shutil.copy(EXAMPLES / f"{name}.py", folder)
    roles = {rival: {"path": "model"}} | (
        {"ref": {"path": "model"}} if name == "nash_md" else {"algo": {"copy_every": 1}}
    )
    reward = {"functions": {"short": {"function": "my_rewards.py:short"}}}
    run_dir = completed(find_flow(f"{name}.py:{name}"), parameters(reward=reward, **roles))
    assert all(0 <= step[metric] <= 1 for step in read_lines(run_dir / "metrics.jsonl"))
    follows = [span["node"] for span in read_lines(run_dir / "task_runs.jsonl") if span["kind"] == "follow"]
    assert [name.partition("@")[2] for name in follows] == ["1", "2"] and all(rival in name for name in follows)


@pytest.mark.slow
@pytest.mark.usefixtures("prefect")
@pytest.mark.all  # test_two_turns.py trains from a plain file
def test_sapo_runs_as_an_entry_point_of_another_package(folder, monkeypatch):
    """Installed somewhere on the path, under the name that the package gives it."""
    install(folder / "site")
    monkeypatch.syspath_prepend(folder / "site")
    steps = trained(find_flow("sapo"), SAPO)
    assert [step["actor_train.initial_ratio"] for step in steps] == pytest.approx([1, 1], abs=0.1)


def test_an_entry_point_is_a_name_on_the_command_line(folder, monkeypatch, capsys):
    install(folder / "site")
    monkeypatch.syspath_prepend(folder / "site")
    assert main(["graph", "sapo"]) == 0
    assert (folder / "sapo.svg").is_file()
    assert main(["sapoo"]) == 2
    assert "closest: sapo" in capsys.readouterr().err


def install(site):
    """Put SAPO there as a package of its own, as pip leaves one."""
    package, metadata = site / "acme_rlhf", site / "acme_rlhf-1.0.dist-info"
    package.mkdir(parents=True)
    metadata.mkdir()
    (package / "__init__.py").write_text("")
    shutil.copy(EXAMPLES / "sapo.py", package / "soft.py")
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: acme-rlhf\nVersion: 1.0\n")
    (metadata / "entry_points.txt").write_text("[prefect_rlhf.algorithms]\nsapo = acme_rlhf.soft:sapo\n")
