"""The base install has no torch, Megatron or vLLM: it draws, dry-runs and plans; a run says what to install."""

import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from tests.support.hub_stand_in import stand_in, variables
from tests.support.tiny import ppo_parameters

PROGRAM = Path(__file__).with_name("without_engines.py")


def command(folder, *words):
    """The command as a person without engines starts it in `folder`."""
    line = [sys.executable, PROGRAM, *words]
    return subprocess.run(line, cwd=folder, capture_output=True, text=True, timeout=300, check=False)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("laptop")
    (folder / "parameters.yaml").write_text(yaml.safe_dump(ppo_parameters(folder)))
    return folder


@pytest.mark.all  # test_docs.py draws one
def test_a_graph_is_drawn(folder):
    done = command(folder, "graph", "grpo", "-p", "algo.samples_per_prompt=4")
    assert done.returncode == 0, done.stderr
    assert "actor <- actor_train (of the step before)" in done.stdout
    assert (folder / "grpo.svg").read_text().startswith("<svg")


def test_a_dry_run_decides_all_that_a_run_would(folder):
    done = command(folder, "run", "ppo", "--parameters", "parameters.yaml", "--devices", "2", "--dry-run")
    assert done.returncode == 0, done.stderr
    assert "no step was started" in done.stdout


def test_a_run_says_what_to_install_in_one_line(folder):
    done = command(folder, "ppo", "--parameters", "parameters.yaml", "--devices", "2")
    assert done.returncode == 2
    (line,) = done.stderr.splitlines()
    assert line.startswith("prefect-rlhf: torch is not installed") and ".[cpu]" in line


@pytest.mark.all  # test_hub_run.py reads one
def test_a_dry_run_reads_a_model_of_the_hub_by_its_name(folder, monkeypatch, tmp_path):
    """A process of its own, with the variables of a user, downloads once and asks the Hub for nothing else."""
    with stand_in() as hub:
        for name, value in variables(hub, tmp_path / "hf").items():
            monkeypatch.setenv(name, value)
        monkeypatch.delenv("RLHF_HUB_OFFLINE")
        commit = hub.add("acme/tiny", folder / "actor")
        words = ["--parameters", "parameters.yaml", "--devices", "2", "--dry-run", "-p", "ref.path=acme/tiny@main"]
        done = command(folder, "run", "ppo", *words, "-p", "actor.path=acme/tiny")
        assert done.returncode == 0, done.stderr
        assert f"actor.path: acme/tiny@main is at commit {commit}" in done.stderr
        assert "no step was started" in done.stdout
        asked = [one for one in hub.requests if "agent" not in one]
        assert all("/acme/tiny" in one for one in asked)
        assert len(hub.asked_for("GET", "/model.safetensors")) == 1


@pytest.mark.all
def test_a_plan_is_searched(folder):
    models = ["--model", "actor=llama-7b", "--model", "critic=llama-7b"]
    lengths = ["--prompt-length", "128", "--response-length", "128", "--batch-size", "64"]
    done = command(folder, "plan", "ppo", *models, *lengths, "--cluster", "1x8:h100", "--output", "plans")
    assert done.returncode == 0, done.stderr
