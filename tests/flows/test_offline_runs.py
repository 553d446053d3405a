"""Algorithms that learn from stored rows: real Prefect and Megatron-core, a tiny model."""

import math

import pytest
from transformers import AutoModelForSequenceClassification

from prefect_rlhf.flows.dpo import dpo
from prefect_rlhf.flows.kto import kto
from prefect_rlhf.flows.reward import reward
from prefect_rlhf.flows.sft import sft
from tests.support.runs import completed, read_lines
from tests.support.tiny import make_model
from tests.tasks.data.stored import json_lines

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("prefect", "own_home")]


def run(flow, folder, steps, **given):
    """The metrics of the steps and of the evaluations of a run in a folder."""
    given["algo"] |= {"optimizer": {"lr": 1e-2}}
    folder = completed(flow, given | {"steps": steps, "output_dir": str(folder / "runs")})
    assert (folder / "actor" / "model.safetensors").is_file()
    return read_lines(folder / "metrics.jsonl"), read_lines(folder / "evaluation.jsonl")


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
    given = {"chats": {"path": path}, "held_out": {"path": path, "split": "held_out"}}
    given |= {"actor": {"path": make_model(tmp_path / "actor")}, "algo": {"batch_size": 3, "evaluate_every": 3}}
    steps, evaluations = run(sft, tmp_path, 6, **given)
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
    path = pairs(tmp_path / "pairs.jsonl")
    given = {"pairs": {"path": path}, "held_out": {"path": path, "split": "held_out"}, "actor": model}
    given |= {"ref": model} if loss == "dpo" else {}
    algo = {"loss": loss, "batch_size": 4, "evaluate_every": 2}
    steps, evaluations = run(dpo, tmp_path, 4, algo=algo, **given)
    margins = [each["preference_accuracy.margin"] for each in evaluations]
    assert margins[0] < margins[1] < margins[2]
    assert evaluations[-1]["preference_accuracy.accuracy"] == 1.0
    if loss == "dpo":
        assert (margins[0], evaluations[0]["preference_accuracy.accuracy"]) == (0.0, 0.5)
        assert steps[0]["actor_train.loss"] == pytest.approx(math.log(2), abs=1e-3)


def test_a_reward_model_is_exported_with_its_scalar_head(tmp_path):
    """The head begins with zeros, so a step of training moved it."""
    path = pairs(tmp_path / "pairs.jsonl")
    given = {"pairs": {"path": path}, "held_out": {"path": path, "split": "held_out"}, "steps": 1}
    given |= {"reward": {"path": make_model(tmp_path / "model"), "head": "scalar", "new_head": True}}
    given |= {"algo": {"batch_size": 4, "evaluate_every": 2}, "output_dir": str(tmp_path / "runs")}
    model = AutoModelForSequenceClassification.from_pretrained(completed(reward, given) / "reward")
    assert model.score.weight.shape == (1, model.config.hidden_size)
    assert model.score.weight.abs().max() > 0


def test_kto_learns_from_answers_that_are_good_or_bad_by_themselves(tmp_path):
    rows = [
        {"prompt": prompt, "completion": text, "label": text == "the best", "split": split}
        for split in ("train", "held_out")
        for prompt in ("what is it", "is it good")
        for text in ("the best", "a bad film")
    ]
    model = {"path": make_model(tmp_path / "actor")}
    path = json_lines(tmp_path / "answers.jsonl", *rows)
    given = {"answers": {"path": path}, "held_out": {"path": path, "split": "held_out"}, "actor": model, "ref": model}
    steps, evaluations = run(kto, tmp_path, 4, algo={"batch_size": 4, "evaluate_every": 2}, **given)
    assert (steps[0]["kto_kl.kl"], steps[0]["actor_train.loss"]) == (0.0, pytest.approx(0.5, abs=1e-3))
    assert evaluations[0]["label_accuracy.accuracy"] == 0.5 < evaluations[-1]["label_accuracy.accuracy"] == 1.0
    assert evaluations[-1]["label_accuracy.margin"] > 0
