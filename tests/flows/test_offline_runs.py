"""Algorithms that learn from rows that are there: real Prefect and Megatron-core, a tiny model."""

import json
import math
from pathlib import Path

import pytest

from prefect_rlhf.flows.sft import sft
from tests.tasks.data.stored import json_lines
from tests.tiny import make_model

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("prefect")]
LEARNER = {"lr": 1e-2}


@pytest.fixture(autouse=True)
def leases(monkeypatch, tmp_path):
    """Leases of this test alone."""
    monkeypatch.setenv("HOME", str(tmp_path))


def run(flow, parameters):
    """The metrics of a run's steps and of its evaluations."""
    state = flow(**flow.validate_parameters(parameters), return_state=True)
    assert state.is_completed(), state.message
    folder = Path(state.result()["run_dir"])
    assert (folder / "actor" / "model.safetensors").is_file()
    return tuple(
        [json.loads(line) for line in (folder / name).read_text().splitlines()]
        for name in ("metrics.jsonl", "evaluation.jsonl")
    )


def test_supervised_fine_tuning_lowers_the_loss_of_answers_it_never_saw(tmp_path):
    """Of the same kind as those that it did; evaluated before, between and after."""
    ways = ["what is it", "is it good", "what is the film", "is the film bad"]
    chats = [
        {
            "messages": [{"role": "user", "content": way}, {"role": "assistant", "content": "the best film"}],
            "split": "train" if number < 3 else "held_out",
        }
        for number, way in enumerate(ways)
    ]
    path = json_lines(tmp_path / "chats.jsonl", *chats)
    steps, evaluations = run(
        sft,
        {
            "chats": {"path": path},
            "held_out": {"path": path, "split": "held_out"},
            "actor": {"path": make_model(tmp_path / "actor")},
            "algo": {"batch_size": 3, "evaluate_every": 3, "optimizer": LEARNER},
            "steps": 6,
            "output_dir": str(tmp_path / "runs"),
        },
    )
    losses = [each["token_loss.loss"] for each in evaluations]
    assert [each["step"] for each in evaluations] == [0, 3, 6]
    assert all(each["token_loss.tokens"] == 3 for each in evaluations), "the answer's alone"
    assert losses[0] > losses[1] > losses[2] and math.isclose(steps[0]["actor_train.loss"], losses[0], rel_tol=0.3)
