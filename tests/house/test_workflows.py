"""The workflows that a fork runs: the make targets of this repository, pinned actions, and no right to write."""

import re
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).parents[2]
WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))
TARGETS = set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))


@pytest.fixture(params=WORKFLOWS, ids=lambda path: path.stem)
def workflow(request):
    return yaml.safe_load(request.param.read_text())


def test_a_job_runs_only_make_targets(workflow):
    """So that a person runs the same on their machine; one of the jobs is the README's test command."""
    commands = [step["run"].split() for job in workflow["jobs"].values() for step in job["steps"] if "run" in step]
    assert all(words[0] == "make" and set(words[1:]) <= TARGETS for words in commands)
    assert ["make", "test"] in commands


def test_an_action_is_pinned_by_its_commit(workflow):
    used = [step["uses"] for job in workflow["jobs"].values() for step in job["steps"] if "uses" in step]
    assert used and [each for each in used if not re.fullmatch(r"[\w/-]+@[0-9a-f]{40}", each)] == []


def test_a_job_may_only_read_and_has_a_time_limit(workflow):
    assert workflow["permissions"] == {}
    for job in workflow["jobs"].values():
        assert job["permissions"] == {"contents": "read"} and job["timeout-minutes"] <= 90


def test_hooks_before_a_commit_need_no_other_host():
    hooks = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text())
    assert [repository["repo"] for repository in hooks["repos"]] == ["local"]
    assert {hook["language"] for hook in hooks["repos"][0]["hooks"]} == {"system"}
