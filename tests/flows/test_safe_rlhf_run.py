"""Safe RLHF: six models, nine calls to them and a second loss for the policy, in a real run of tiny models."""

from pathlib import Path

import pytest

from prefect_rlhf.flows.safe_rlhf import safe_rlhf
from tests.support.runs import completed, leased, plan_file, read_lines
from tests.support.tiny import make_pairs

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("prefect", "own_home")]
COMPUTATIONS = (
    "kl_penalised_rewards",
    "kl_penalised_costs",
    "gae",
    "cost_gae",
    "lagrange_multiplier",
    "lagrange_advantages",
    "record_rollouts",
    "record_safe_evaluation",
)
SCORED = {"reward_inference": "0", "cost_score": "1", "critic_inference": "2", "cost_critic_inference": "3"}
PLAN = {
    "actor_generate": "0-3 dp2 tp2 engine=vllm",
    **{call: f"{device} engine=megatron" for call, device in SCORED.items()},
    "ref_inference": "0-1 dp2 engine=megatron",
    "actor_train": "0-3 dp2 pp2 engine=megatron micro_batches=2",
    "critic_train": "0-1 dp2 engine=megatron",
    "cost_critic_train": "2-3 tp2 engine=megatron",
    "actor_evaluation": "0-3 dp2 tp2 engine=vllm",
    "reward_evaluation": "0 engine=megatron",
    "cost_evaluation": "1 engine=megatron",
}
"""Both critics train side by side, on devices and in layouts of their own."""


@pytest.fixture
def safe(parameters, tmp_path):
    """Parameters of a run whose cost lies far above its limit, which only a growing multiplier can answer."""
    pretrain = {"path": make_pairs(tmp_path / "texts.parquet"), "form": "text", "text_column": "chosen"}
    scorer = parameters["reward"]
    more = {"pretrain": pretrain, "cost": scorer, "cost_critic": scorer, "output_dir": str(tmp_path / "runs")}
    algo = parameters["algo"] | {"limit": -10.0, "ptx_batch_size": 4}
    return parameters | more | {"algo": algo}


def run(parameters):
    """The metrics of a run's steps and of its evaluations."""
    folder = completed(safe_rlhf, parameters)
    trained = {path.parent.name for path in folder.glob("*/model.safetensors")}
    assert trained == {"actor", "critic", "cost_critic"}
    return read_lines(folder / "metrics.jsonl"), read_lines(folder / "evaluation.jsonl")


def check(steps, evaluations):
    multipliers = [step["lagrange_multiplier.multiplier"] for step in steps]
    assert 1.0 < multipliers[0] < multipliers[1], "the cost is above its limit"
    for step in steps:
        total = step["actor_train.ppo_clip.loss"] + 0.1 * step["actor_train.nll.loss"]
        assert step["actor_train.loss"] == pytest.approx(total, rel=1e-4, abs=1e-5)
    assert steps[0]["lagrange_multiplier.cost"] == pytest.approx(steps[0]["kl_penalised_rewards.score"], abs=0.02)
    assert all("record_safe_evaluation.cost" in each for each in evaluations)


def test_a_cost_above_its_limit_raises_the_multiplier_and_both_critics_learn(safe):
    """The cost model is the reward model here, so both have one mean."""
    check(*run(safe))


@pytest.mark.all
def test_safe_rlhf_runs_with_separate_devices_and_layouts_per_role(safe):
    path = plan_file(PLAN, Path(safe["output_dir"]).parent / "plan.json", COMPUTATIONS)
    with leased(4):
        check(*run(safe | {"plan": str(path)}))
