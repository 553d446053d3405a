"""TRL's options, translated, train as TRL does: its own trainers made the numbers of `tests/data/trl_training.json`.

Real rows, planning, Megatron-core and optimizer in float32, on one rank, without Prefect. What a policy says is given.
"""

import json
from pathlib import Path

import pytest
import yaml
from safetensors.torch import load_file

from prefect_rlhf.engines.engine import Generated
from prefect_rlhf.engines.megatron.engine import MegatronEngine
from prefect_rlhf.flows.algorithm.rlhf_flow import find_flow
from prefect_rlhf.flows.commands.cli import main
from prefect_rlhf.tasks.data.rows import row_order
from tests.support.formula_model import change, make_formula_adapter, make_formula_model
from tests.support.on_one_rank import train_on_one_rank
from tests.tasks.data.stored import json_lines

pytestmark = pytest.mark.slow

FILE = json.loads((Path(__file__).parent / "data" / "trl_training.json").read_text())
CASES = FILE["cases"]
ROWS = {"sft": "chats", "dpo": "pairs", "kto": "answers", "reward": "pairs", "grpo": "prompts"}
VALUE_OF_ITS_OWN = ("rloo", "grpo, k2")
"""Only the gradient equals TRL's here, not the loss: RLOO sums over tokens, and k2 replaces k3 times the ratio."""
REWARD = """
def reward(completion_ids, **columns):
    return [sum(ids) % 7 / 2 for ids in completion_ids]
"""


def translated(folder: Path, case: dict, path: str) -> tuple[str, dict]:
    """The flow and the parameters that `prefect-rlhf translate` makes of a case's options."""
    theirs, ours = folder / "theirs.yaml", folder / "ours.yaml"
    rows = json_lines(folder / "rows.jsonl", *FILE["rows"][case["trainer"]])
    online = {"reward_funcs": ["rewards.reward"]} if case["trainer"] in ("grpo", "rloo") else {}
    stated = {"model_name_or_path": path, "dataset_name": rows, **online, **case["options"]}
    theirs.write_text(yaml.safe_dump(stated))
    assert main(["translate", str(theirs), "--from", "trl", "--algorithm", case["trainer"], "--out", str(ours)]) == 0
    name = "grpo" if online else case["trainer"]
    return name, yaml.safe_load(ours.read_text())


@pytest.mark.parametrize("name", CASES)
def test_a_translated_job_has_the_losses_gradients_rates_and_weights_of_trl(tmp_path, monkeypatch, name):
    """After each optimizer step, or as means over those of a train_step; micro-batches are as many as TRL's."""
    case = CASES[name]
    path = make_formula_model(tmp_path / "model", case["family"], scalar=case["trainer"] == "reward")
    flow, given = translated(tmp_path, case, path)
    given |= {"held_out": given[ROWS[flow]], "output_dir": str(tmp_path / "runs")}
    before = load_file(Path(path) / "model.safetensors")
    if "use_peft" in case["options"]:
        adapter = make_formula_adapter(tmp_path / "adapter", path, case["options"])
        given["actor"]["adapter"]["path"] = adapter
        read = load_file(Path(adapter) / "adapter_model.safetensors")
        before = {each.removeprefix("base_model.model."): values for each, values in read.items()}
    role = "reward" if flow == "reward" else "actor"
    micro_batches = case["options"].get("gradient_accumulation_steps", 1)
    given["placement"] = {f"{role}_train": {"micro_batches": micro_batches}}
    if flow == "grpo":
        (tmp_path / "rewards.py").write_text(REWARD)
        given["reward"]["functions"]["reward"]["function"] = f"{tmp_path / 'rewards.py'}:reward"
        given["placement"] |= {call: {"engine": "megatron"} for call in ("actor_generate", "actor_evaluation")}
    said = iter(FILE["responses"])

    def generate(self, prompts, sampling, seeds, micro_batches=1):
        tokens = next(said)
        return Generated(tokens, [[-1.0] * len(each) for each in tokens])

    monkeypatch.setattr(MegatronEngine, "generate", generate)
    monkeypatch.setattr(row_order, "_permutation", lambda seed, epoch, num_items: tuple(range(num_items)))
    trained = train_on_one_rank(find_flow(flow), given, tmp_path / "run", role)

    updates = len(case["loss"]) // len(trained.steps)
    for number, metrics in enumerate(trained.steps):
        of_step = slice(number * updates, (number + 1) * updates)
        for metric in ("grad_norm", *(() if name in VALUE_OF_ITS_OWN else ("loss",))):
            assert metrics[metric] == pytest.approx(sum(case[metric][of_step]) / updates, rel=1e-5, abs=1e-6), metric
        assert metrics["learning_rate"] == pytest.approx(case["learning_rate"][of_step][-1], rel=1e-9)
    changes = {each: change(each, values, trained.weights[each]) for each, values in before.items()}
    assert changes == pytest.approx(case["changes"], rel=1e-3, abs=2e-5)
    assert max(map(abs, changes.values())) > 1e-3
