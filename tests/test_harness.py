"""lm-evaluation-harness on a folder as a run exports it, beside our own evaluation of the same task."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import yaml
from transformers import AutoModelForCausalLM, AutoTokenizer

from prefect_rlhf import run
from prefect_rlhf.flows.algorithm.evaluation.flow import evaluate
from tests.support.runs import environment
from tests.support.tiny import make_model
from tests.tasks.data.stored import json_lines
from tests.tasks.small_tokenizer import WORDS

pytestmark = [pytest.mark.all, pytest.mark.slow, pytest.mark.usefixtures("prefect")]
TOKENS = 5
REWARD = "def exact(row):\n    return float(row['response'].strip() == row['ground_truth'])\n"
PAGE = Path(__file__).parents[1] / "docs" / "evaluation.md"
TASK = yaml.safe_load(re.search(r"```text\n(task: .*?)```", PAGE.read_text(), re.DOTALL)[1])
"""The task of the page."""


@pytest.fixture
def task(tmp_path, monkeypatch):
    """A model, and questions of which it answers some right: the truth of most is a greedy answer of transformers."""
    monkeypatch.setenv("HOME", str(tmp_path))
    model = make_model(tmp_path / "actor")
    net = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    read = AutoTokenizer.from_pretrained(model)
    rows = []
    for number in range(12):
        prompt = " ".join(WORDS[3 + (number * step) % (len(WORDS) - 3)] for step in range(1, 4))
        tokens = torch.tensor([read.encode(prompt, add_special_tokens=False)])
        made = net.generate(tokens, max_new_tokens=TOKENS, do_sample=False)[0, tokens.shape[1] :]
        said = read.decode(made, skip_special_tokens=True).strip()
        rows.append({"prompt": prompt, "ground_truth": said if number % 3 else "nothing of the kind"})
    (tmp_path / "my_rewards.py").write_text(REWARD)
    return model, json_lines(tmp_path / "questions.jsonl", *rows), tmp_path


def test_our_evaluation_and_the_harness_agree_on_a_task_that_both_can_express(task):
    """Greedy answers to the same prompts, compared with the same truths, in float32."""
    pytest.importorskip("lm_eval", reason="the extra `harness` is not installed")
    model, questions, folder = task
    (folder / "tasks").mkdir()
    lengths = TASK["generation_kwargs"] | {"max_gen_toks": TOKENS}
    stated = TASK | {"dataset_kwargs": {"data_files": questions}, "generation_kwargs": lengths}
    (folder / "tasks" / "questions.yaml").write_text(yaml.safe_dump(stated))
    words = [sys.executable, "-m", "lm_eval", "run", "--model", "hf", "--device", "cpu", "--tasks", "questions"]
    words += ["--model_args", f"pretrained={model},dtype=float32", "--include_path", str(folder / "tasks")]
    words += ["--output_path", str(folder / "harness")]
    done = subprocess.run(words, env=environment(), capture_output=True, text=True, timeout=500, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    (file,) = (folder / "harness").rglob("results*.json")
    theirs = json.loads(file.read_text())["results"]["questions"]["exact_match,strip"]
    one = {"data": {"path": questions, "split_column": None}, "max_new_tokens": TOKENS}
    result = run(
        evaluate,
        actor={"path": model, "dtype": "float32"},
        evaluation={"questions": one},
        reward={"functions": {"exact": {"function": f"{folder}/my_rewards.py:exact"}}},
        steps=1,
        output_dir=str(folder / "runs"),
    )
    assert result.metrics[-1]["evaluation_questions.avg@1"] == pytest.approx(theirs)
    assert 0 < theirs < 1
