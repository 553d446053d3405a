"""A key of another trainer is answered with what the algorithm at hand has, and no word is corrected to a wrong one."""

import pytest

from prefect_rlhf.errors.errors import InvalidInput
from prefect_rlhf.flows.algorithm.rlhf_flow import find_flow

WITHOUT_EFFECT = {
    "push_to_hub": True, "logging_steps": 10, "vllm_gpu_memory_utilization": 0.5, "gpu_memory_utilization": 0.5,
    "deepspeed": "zero3.json", "fsdp": "full_shard", "attn_implementation": "sdpa", "eval_on_start": True,
    "use_liger_kernel": True, "param_offload": True, "run_name": "mine", "experiment_name": "mine", "use_vllm": True,
    "trainer": {"nnodes": 1},
}  # fmt: skip
REPLACED = {
    "model_name_or_path": ("m", "actor.path"), "dataset_name": ("d", "prompts.path"),
    "save_strategy": ("steps", "checkpoint_every"),
    "reward_funcs": (["f"], "reward.functions"), "custom_reward_function": ({"path": "f.py"}, "reward.functions"),
    "actor_rollout_ref": ({"model": {"path": "m"}}, "actor.path"), "loss_type": ("dapo", "algo.loss, algo.mean_over"),
    "beta": (0.1, "algo.kl.coefficient"), "algo": ({"beta": 0.1}, "algo.kl.coefficient"),
}  # fmt: skip
REFUSED = {"lora": {"r": 16}, "critic_warmup": 5, "entropy_coef": 0.1}


def said(algorithm, parameters):
    with pytest.raises(InvalidInput) as refused:
        find_flow(algorithm).validate_parameters(parameters)
    return str(refused.value)


@pytest.mark.parametrize("key", WITHOUT_EFFECT)
def test_a_key_that_needs_nothing_here_may_be_left_out_for_a_reason(key):
    assert "; leave it out: " in said("grpo", {key: WITHOUT_EFFECT[key]})


@pytest.mark.parametrize("key", REPLACED)
def test_a_key_with_a_parameter_here_is_answered_with_it(key):
    value, ours = REPLACED[key]
    assert said("grpo", {key: value}).endswith(f"; here: {ours}")


@pytest.mark.parametrize("key", REFUSED)
def test_a_key_without_a_counterpart_is_answered_with_the_reason(key):
    line = said("grpo", {key: REFUSED[key]})
    assert "; here: " in line and "closest" not in line and "parameters are" not in line


@pytest.mark.parametrize("key", ["deepspeed", "reward_funcs", "experiment_name", "critic_warmup", "nnodes"])
def test_no_key_of_another_trainer_is_taken_for_a_misspelt_key_of_ours(key):
    assert "closest" not in said("grpo", {key: 1})


@pytest.mark.parametrize(
    ("algorithm", "ours"), [("grpo", "algo.kl.coefficient"), ("kto", "algo.beta"), ("ppo", "algo.kl.coefficient")]
)
def test_only_parameters_of_the_algorithm_at_hand_are_named(algorithm, ours):
    assert said(algorithm, {"beta": 0.1}).endswith(f"; here: {ours}")


def test_a_key_is_not_answered_with_itself():
    """TRL's `beta` is a setting of DPO here too, and not one of GRPO."""
    assert "algo.beta, " not in said("grpo", {"algo": {"beta": 0.1}})
    assert find_flow("dpo").parameters.properties


def test_the_name_of_a_loss_elsewhere_is_answered_with_the_settings_that_make_it():
    line = said("grpo", {"algo": {"loss": "dr_grpo"}})
    assert line == (
        "algo.loss: got 'dr_grpo', expected 'clip', 'gspo' or 'cispo'; here: algo.mean_over: the number of "
        "algo.sampling.max_new_tokens, algo.advantage: dr_grpo"
    )
    assert said("grpo", {"algo": {"mean_over": "token-mean"}}).endswith("; here: tokens")
    assert "prefect-rlhf run ppo" in said("grpo", {"algo": {"advantage": "gae"}})


def test_every_unknown_key_is_answered_at_once_and_a_whole_file_has_its_command():
    verl = {
        "actor_rollout_ref": {"rollout": {"n": 8}, "actor": {"optim": {"lr": 1e-6}, "ppo_mini_batch_size": 64}},
        "trainer": {"nnodes": 1, "total_epochs": 3},
    }
    line = said("grpo", verl)
    assert line.startswith(
        "5 mistakes: (1) actor_rollout_ref.rollout.n: unknown key (got 8); here: algo.samples_per_prompt (2)"
    )
    assert line.endswith("(prefect-rlhf translate FILE translates a whole file of TRL, verl or OpenRLHF)")
    assert "\n" not in line


def test_two_misspelt_keys_are_corrected_at_once_without_a_word_about_other_trainers():
    line = said("grpo", {"promts": {"path": "p"}, "algo_": 1})
    assert line.startswith("2 mistakes: ") and "closest: prompts" in line and "translate" not in line


@pytest.mark.parametrize("key", ["zzz", "promts", "stepz"])
def test_a_word_of_no_trainer_is_corrected_as_before(key):
    line = said("grpo", {key: 1})
    assert "here: " not in line and "leave it out" not in line
