"""Algorithms that learn from stored rows: real Prefect and Megatron-core, a tiny model."""

import json
import math
from pathlib import Path

import pytest

from prefect_rlhf.flows.dpo import dpo
from prefect_rlhf.flows.kto import kto
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


def pairs(path):
    """Pairs in messages: what is answered well, and what is not."""
    asked = [{"role": "user", "content": "what is it"}]
    answers = {"chosen": "the best film", "rejected": "a bad film"}
    sides = {side: [*asked, {"role": "assistant", "content": text}] for side, text in answers.items()}
    return json_lines(path, *({**sides, "split": split} for split in ["train"] * 4 + ["held_out"] * 2))


@pytest.mark.parametrize("loss", ["dpo", pytest.param("simpo", marks=pytest.mark.all)])
def test_preferences_are_learnt_from_pairs_of_messages(tmp_path, loss):
    """From a tie with the reference; without one, from what the model prefers at first."""
    model = {"path": make_model(tmp_path / "actor")}
    steps, evaluations = run(
        dpo,
        {
            "pairs": {"path": pairs(tmp_path / "pairs.jsonl")},
            "held_out": {"path": str(tmp_path / "pairs.jsonl"), "split": "held_out"},
            "actor": model,
            **({"ref": model} if loss == "dpo" else {}),
            "algo": {"loss": loss, "batch_size": 4, "evaluate_every": 2, "optimizer": LEARNER},
            "steps": 4,
            "output_dir": str(tmp_path / "runs"),
        },
    )
    margins = [each["preference_accuracy.margin"] for each in evaluations]
    assert margins[0] < margins[1] < margins[2]
    assert evaluations[-1]["preference_accuracy.accuracy"] == 1.0
    if loss == "dpo":
        assert (margins[0], evaluations[0]["preference_accuracy.accuracy"]) == (0.0, 0.5)
        assert steps[0]["actor_train.loss"] == pytest.approx(math.log(2), abs=1e-3)


def test_kto_learns_from_answers_that_are_good_or_bad_by_themselves(tmp_path):
    rows = [
        {"prompt": prompt, "completion": text, "label": text == "the best", "split": split}
        for split in ("train", "held_out")
        for prompt in ("what is it", "is it good")
        for text in ("the best", "a bad film")
    ]
    model = {"path": make_model(tmp_path / "actor")}
    steps, evaluations = run(
        kto,
        {
            "answers": {"path": json_lines(tmp_path / "answers.jsonl", *rows)},
            "held_out": {"path": str(tmp_path / "answers.jsonl"), "split": "held_out"},
            "actor": model,
            "ref": model,
            "algo": {"batch_size": 4, "evaluate_every": 2, "optimizer": LEARNER},
            "steps": 4,
            "output_dir": str(tmp_path / "runs"),
        },
    )
    assert (steps[0]["kto_kl.kl"], steps[0]["actor_train.loss"]) == (0.0, pytest.approx(0.5, abs=1e-3))
    assert evaluations[0]["label_accuracy.accuracy"] == 0.5 < evaluations[-1]["label_accuracy.accuracy"] == 1.0
    assert evaluations[-1]["label_accuracy.margin"] > 0
