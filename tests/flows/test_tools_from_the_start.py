"""docs/tools_from_the_start.md, word for word, on the model of the README: from chats with calls to GRPO with tools."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from benchmarks.demo.pretrained import prepare_model
from prefect_rlhf.flows.algorithm.run_result import RunResult
from prefect_rlhf.flows.commands.init import project, write_new
from tests.support.runs import environment
from tests.test_end_to_end import CACHE

pytestmark = [pytest.mark.slow, pytest.mark.all, pytest.mark.timeout(3600), pytest.mark.usefixtures("prefect")]

PAGE = Path(__file__).parents[2] / "docs" / "tools_from_the_start.md"
FEWER_STEPS = "-p steps=2"  # of GRPO: the test asks for calls and their answers, the page shows what is learnt
LIMIT_SECONDS = 1700


def test_the_page_leads_from_a_model_without_calls_to_rewards_for_calls(tmp_path):
    """About eight minutes on two free cores."""
    text = PAGE.read_text()
    write_new(tmp_path, project(tmp_path))
    for name, block in re.findall(r"^```\w+ file=(\S+)[^\n]*\n(.*?)^```$", text, re.MULTILINE | re.DOTALL):
        (tmp_path / name).write_text(block)
    prepare_model("smollm2", CACHE / "models" / "smollm2", CACHE / "downloads")
    (tmp_path / "models").symlink_to(CACHE / "models")
    for command in re.findall(r"^\$ (.*)$", text, re.MULTILINE):
        program, *words = command.split()
        words += FEWER_STEPS.split() if "grpo" in words else []
        path = Path(sys.executable).with_name(program)
        given = {"cwd": tmp_path, "env": environment(HOME=str(tmp_path)), "capture_output": True, "text": True}
        ended = subprocess.run([path, *words], check=False, timeout=LIMIT_SECONDS, **given)
        assert ended.returncode == 0, ended.stdout + ended.stderr

    losses = [step["actor_train.loss"] for step in RunResult.read(tmp_path / "runs" / "calls" / "latest").metrics]
    assert losses[-1] < 0.2 < losses[0]
    trained = tmp_path / "runs" / "shopping" / "latest"
    for step in RunResult.read(trained).metrics:
        assert step["actor_generate.play/tool_calls"] > 1 and step["grpo_advantages.score"] > 0.2
    rows = [row for file in trained.glob("rollouts/*.parquet") for row in pq.read_table(file).to_pylist()]
    best = max(rows, key=lambda row: row["reward"])
    assert best["reward"] > 1, json.dumps(best["messages"])
    told = [turn["content"] for turn in best["messages"] if turn["role"] == "environment"]
    assert len(told) > 1 and all("<tool_response>" in each for each in told)
    for folder in (tmp_path / "runs" / "calls" / "latest" / "actor", trained / "actor"):
        assert (folder / "chat_template.jinja").read_text() == (tmp_path / "tools.jinja").read_text()
