"""A whole run whose train_step takes two row sets: the same tokens, losses and weights under every plan, in float32."""

import json
from pathlib import Path

import pytest
from safetensors.torch import load_file

from tests import plan_matrix
from tests.tiny import make_model, make_pairs, make_prompts

TOLERANCE = 1e-5
COMPUTATIONS = ("grpo_advantages", "record_rollouts")
ALONE = {"actor_generate": "0 engine=vllm", "reward_inference": "0 engine=megatron", "actor_train": "0 engine=megatron"}
PLANS = {
    "replicas, other rows elsewhere": {
        "actor_generate": "0-1 dp2 engine=vllm",
        "reward_inference": "2-3 dp2 engine=megatron",
        "actor_train": "0-3 dp4 engine=megatron",
    },
    "pipeline": {
        "actor_generate": "0-3 dp2 tp2 engine=vllm",
        "reward_inference": "0-3 pp4 engine=megatron",
        "actor_train": "0-3 dp2 pp2 engine=megatron micro_batches=2",
    },
    "shards": {
        "actor_generate": "0-3 tp4 engine=vllm",
        "reward_inference": "0 engine=megatron",
        "actor_train": "0-3 tp2 pp2 engine=megatron micro_batches=2",
    },
}
METRICS = ("loss", "grad_norm", "policy_gradient.loss", "nll.loss")

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def parameters(tmp_path_factory):
    folder = tmp_path_factory.mktemp("pretraining")
    actor = make_model(folder / "actor", layers=4, hidden=128, heads=4)
    reward = make_model(folder / "reward", scalar=True, layers=5, hidden=128, heads=4)
    return {
        "prompts": {"path": make_prompts(folder / "prompts.parquet", num_train=8)},
        "pretrain": {"path": make_pairs(folder / "pairs.parquet")},
        "actor": {"path": actor, "dtype": "float32"},
        "reward": {"path": reward, "head": "scalar", "dtype": "float32"},
        "algo": {
            "batch_size": 4,
            "samples_per_prompt": 3,
            "sampling": {"max_new_tokens": 8},
            "kl": {"coefficient": 0},
            "update": {"mini_batches": 3},
            "optimizer": {"lr": 2e-3, "eps": 1e-3},
        },
        "output_dir": str(folder / "runs"),
        "steps": 2,
    }


def run(given, plan, name, num_devices=4):
    """The rollouts, metrics and weights of a run under a plan."""
    from tests.pretraining_term import with_pretraining

    path = plan_matrix.plan_file(plan, Path(given["output_dir"]).parent / f"{name[:5]}.json", COMPUTATIONS)
    with plan_matrix.leased(num_devices):
        state = with_pretraining(
            **with_pretraining.validate_parameters({**given, "plan": str(path)}), return_state=True
        )
    assert state.is_completed(), state.message
    folder = Path(state.result()["run_dir"])
    metrics = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return plan_matrix.rollouts(folder, "tokens"), metrics, load_file(folder / "actor" / "model.safetensors")


@pytest.fixture(scope="module")
def alone(prefect, parameters):
    """The run on one device."""
    return run(parameters, ALONE, "alone", num_devices=1)


@pytest.mark.all  # tests/engines/megatron/test_megatron_ranks.py trains on two row sets under several layouts
@pytest.mark.parametrize("name", PLANS)
def test_terms_on_two_row_sets_give_one_result_under_every_plan(parameters, alone, name):
    tokens, metrics, weights = run(parameters, PLANS[name], name)
    assert tokens == alone[0]
    for step, expected in zip(metrics, alone[1], strict=True):
        for metric in METRICS:
            assert step[f"actor_train.{metric}"] == pytest.approx(
                expected[f"actor_train.{metric}"], abs=TOLERANCE, rel=1e-5
            )
        total = step["actor_train.policy_gradient.loss"] + 0.5 * step["actor_train.nll.loss"]
        assert step["actor_train.loss"] == pytest.approx(total, abs=TOLERANCE)
    for key, values in weights.items():
        assert float((values - alone[2][key]).abs().max()) < TOLERANCE, key


@pytest.mark.all  # test_megatron_ranks.py trains on two row sets
def test_the_other_rows_are_learnt(alone):
    """Their own likelihood rises, so their gradient is in the step."""
    first, last = (step["actor_train.nll.loss"] for step in (alone[1][0], alone[1][-1]))
    assert last < first - 0.1
