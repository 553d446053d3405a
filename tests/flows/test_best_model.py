"""Runs that look for their best model: they end early, as Completed, and what they return is that model."""

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from prefect_rlhf.errors.errors import InvalidInput
from prefect_rlhf.flows.sft import sft
from prefect_rlhf.placement.devices.mesh import ClusterShape
from prefect_rlhf.tasks.data.chats import ChatDataset
from tests.support.runs import end, prepared, read_lines, whole
from tests.support.tiny import make_model
from tests.tasks.data.stored import json_lines

ONE_DEVICE = whole(ClusterShape("desk", num_nodes=1, devices_per_node=1, device_memory_bytes=8 << 30))


@pytest.fixture
def parameters(monkeypatch, tmp_path):
    """SFT on answers that make those held out less likely: the first evaluation after the start is the best."""
    monkeypatch.setenv("HOME", str(tmp_path))
    rows = [
        {"prompt": "what is it", "completion": text, "split": split}
        for split, text in (("train", "the best film"), ("held_out", "a bad good what user"))
    ]
    path = json_lines(tmp_path / "chats.jsonl", *rows)
    return {
        "chats": {"path": path},
        "held_out": {"path": path, "split": "held_out"},
        "actor": {"path": make_model(tmp_path / "actor"), "dtype": "float32"},
        "algo": {"batch_size": 1, "evaluate_every": 2, "optimizer": {"lr": 1e-2}},
        "steps": 40,
        "checkpoint_every": 2,
        "best_metric": "token_loss.loss",
        "best_is": "lowest",
        "patience": 2,
        "output_dir": str(tmp_path / "runs"),
    }


@pytest.mark.slow
@pytest.mark.usefixtures("prefect")
def test_a_run_that_gets_no_better_ends_as_completed_with_its_best_model(parameters):
    """The loss that transformers finds with the returned model is that of the best evaluation."""
    state = end(sft, parameters)
    assert state.is_completed(), state.message
    result = state.result()
    run_dir, best = Path(result["run_dir"]), result["best"]
    evaluated = read_lines(run_dir / "evaluation.jsonl")
    later = [one for one in evaluated if one["step"] > 0]
    assert best["value"] == min(one["token_loss.loss"] for one in later) < later[-1]["token_loss.loss"]
    assert "no better token_loss.loss" in result["ended_early"] and len(later) >= 3
    assert len((run_dir / "metrics.jsonl").read_text().splitlines()) < 40
    source = ChatDataset("held_out", parameters["held_out"]["path"], parameters["actor"]["path"], split="held_out")
    row = {name: values[0] for name, values in source.read([0]).items()}
    tokens, length = torch.tensor(row["tokens"]), row["prompt_length"]
    model = AutoModelForCausalLM.from_pretrained(result["models"]["actor"], dtype=torch.float32)
    with torch.no_grad():
        logprobs = model(tokens[None]).logits[0].log_softmax(-1)
    of_tokens = logprobs[length - 1 : -1].gather(1, tokens[length:, None])[:, 0]
    mask = torch.tensor(row["mask"], dtype=torch.float32)
    assert float(-(of_tokens * mask).sum() / mask.sum()) == pytest.approx(best["value"], abs=1e-4)


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"best_metric": "actor_train.loss"}, r"best_metric: got 'actor_train.loss', .*evaluation.jsonl: .*token_loss"),
        ({"best_metric": "token_loss.los"}, "best_metric: got 'token_loss.los', expected token_loss.loss, perhaps"),
        ({"best_metric": None}, "patience: 2 is not used: best_metric is not set; remove it, or set best_metric"),
        ({"checkpoint_every": None}, "checkpoint_every: got None, expected a divisor of 2"),
        ({"checkpoint_every": 4}, "checkpoint_every: got 4, expected a divisor of 2"),
        ({"keep_checkpoints": 1}, "keep_checkpoints: got 1, expected at least 2"),
        ({"epochs": 3}, "steps: 40 is not used: epochs sets the number of steps; remove it"),
    ],
)
def test_best_metric_is_refused_for_a_flow_without_evaluation_in_one_line(parameters, changes, says):
    with pytest.raises(InvalidInput, match=says) as error:
        prepared(sft, parameters | changes, ONE_DEVICE)
    assert "\n" not in str(error.value)


def test_epochs_say_how_many_steps(parameters):
    """Of one row, three passes of a row a step."""
    del parameters["steps"]
    request = prepared(sft, parameters | {"epochs": 3}, ONE_DEVICE).request
    assert request.spec.steps == request.training_run(None, Path()).num_steps == 3
