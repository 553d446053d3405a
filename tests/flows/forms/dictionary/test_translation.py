"""Options of TRL, verl and OpenRLHF become parameters with which a run trains as it would there."""

import pytest

from prefect_rlhf.flows.forms.dictionary.answer import every_dialect
from prefect_rlhf.flows.forms.dictionary.job import Job
from prefect_rlhf.flows.forms.dictionary.rule import NULL
from prefect_rlhf.flows.forms.dictionary.translation import translation


def translated(name, options, devices=1, rows=None):
    """The translation of options of a trainer such as `trl grpo`."""
    library, trainer = name.split()
    (dialect,) = [one for one in every_dialect() if (one.library, one.trainer) == (library, trainer)]
    return translation(Job.of(dialect, options, devices, rows))


def values(found):
    return {each.path: None if each.value is NULL else each.value for each in found.made}


def outcome(found, option):
    (one,) = [each for each in (*found.outcomes, *found.of_defaults) if each.option == option]
    return one


TRL_BATCH = {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 8, "num_generations": 8}
STEPS = {"max_steps": 100}
CASES = {
    "TRL counts responses, we count prompts": ("trl grpo", TRL_BATCH, {"algo.batch_size": 8}, 2),
    "a batch of generation of several optimizer steps": (
        "trl grpo", TRL_BATCH | {"steps_per_generation": 32}, {"algo.batch_size": 32, "algo.update.mini_batches": 4}, 2,
    ),
    "the batch of generation by its own name": (
        "trl grpo", TRL_BATCH | {"generation_batch_size": 256}, {"algo.batch_size": 32, "algo.update.mini_batches": 4}, 2,
    ),
    "several generations for an optimizer step": (
        "trl grpo", TRL_BATCH | {"steps_per_generation": 2}, {"algo.batch_size": 8}, 2,
    ),
    "a batch of pairs": ("trl dpo", TRL_BATCH, {"algo.batch_size": 64}, 2),
    "optimizer steps of several passes": (
        "trl grpo", TRL_BATCH | STEPS | {"num_iterations": 2, "steps_per_generation": 16},
        {"steps": 25, "algo.update.epochs": 2, "algo.update.mini_batches": 2}, 1,
    ),
    "a share of the steps for the warm-up": ("trl sft", STEPS | {"warmup_ratio": 0.1}, {"algo.optimizer.warmup_steps": 10}, 1),
    "no KL and no reference, as in TRL": ("trl grpo", {"model_name_or_path": "m"}, {"algo.kl.coefficient": 0.0, "ref.path": ...}, 1),
    "a KL has a reference, and the gradient of TRL's corrected KL": (
        "trl grpo", {"model_name_or_path": "m", "beta": 0.1},
        {"algo.kl.coefficient": 0.1, "algo.kl.estimator": "k2", "ref.path": "m"}, 1,
    ),
    "a reference computes in the policy's format": (
        "trl grpo", {"model_name_or_path": "m", "beta": 0.1, "bf16": False}, {"actor.dtype": "float32", "ref.dtype": "float32"}, 1,
    ),
    "no reference has a format": ("trl grpo", {"model_name_or_path": "m", "bf16": False}, {"ref.dtype": ...}, 1),
    "DPO's reference too": ("trl dpo", {"model_name_or_path": "m", "bf16": False}, {"ref.dtype": "float32"}, 1),
    "a reward model computes in the policy's format": (
        "trl rloo", {"reward_model_name_or_path": "r", "bf16": False}, {"reward.path": "r", "reward.dtype": "float32"}, 1,
    ),
    "functions have no format": ("trl grpo", {"reward_funcs": ["a.b"], "bf16": False}, {"reward.dtype": ...}, 1),
    "the plain estimator": ("trl grpo", {"beta": 0.1, "use_bias_correction_kl": False}, {"algo.kl.estimator": "k3"}, 1),
    "Dr. GRPO divides by the longest response": (
        "trl grpo", {"loss_type": "dr_grpo", "scale_rewards": False, "max_completion_length": 300},
        {"algo.mean_over": 300, "algo.advantage": "dr_grpo"}, 1,
    ),
    "CISPO states the bound itself": (
        "trl grpo", {"loss_type": "cispo", "epsilon_high": 5.0}, {"algo.loss": "cispo", "algo.clip_high": 4.0, "algo.clip_low": ...}, 1,
    ),
    "GSPO": ("trl grpo", {"importance_sampling_level": "sequence", "loss_type": "grpo"}, {"algo.loss": "gspo", "algo.clip_low": 0.2}, 1),
    "the correction exists where vLLM generates": (
        "trl grpo", {"use_vllm": True}, {"algo.importance.level": "sequence", "algo.importance.beyond": "mask", "algo.importance.highest": 3.0}, 1,
    ),
    "and not elsewhere": ("trl grpo", {"use_vllm": False}, {"algo.importance.level": ..., "algo.old_logprobs": "recompute"}, 1),
    "RLOO sums over a response": (
        "trl rloo", {"model_name_or_path": "m"},
        {"algo.advantage": "rloo", "algo.mean_over": 1.0, "algo.kl.place": "reward", "algo.kl.estimator": "k1", "ref.path": "m"}, 1,
    ),
    "robust DPO reads label_smoothing": (
        "trl dpo", {"loss_type": "robust", "label_smoothing": 0.1}, {"algo.loss": "robust", "algo.label_smoothing": 0.1}, 1,
    ),
    "a model at a revision": ("trl sft", {"model_name_or_path": "a/b", "model_revision": "v2"}, {"actor.path": "a/b@v2"}, 1),
    "a dataset by its name": (
        "trl sft", {"dataset_name": "a/b", "eval_strategy": "steps"},
        {"chats.path": "hf://datasets/a/b/data/train-*.parquet", "held_out.path": "hf://datasets/a/b/data/test-*.parquet", "chats.split_column": None}, 1,
    ),
    "rewards by their names": (
        "trl grpo", {"reward_funcs": ["mine.right", "accuracy_reward"], "reward_weights": [1.0, 0.5]},
        {"reward.functions": {"right": {"function": "mine:right", "signature": "trl"}, "accuracy_reward": {"function": "trl.rewards:accuracy_reward", "signature": "trl", "weight": 0.5}}}, 1,
    ),
    "a mini-batch's size becomes a number": (
        "verl grpo", {"data.train_batch_size": 1024, "actor.ppo_mini_batch_size": 256, "actor.ppo_epochs": 2},
        {"algo.batch_size": 1024, "algo.update.mini_batches": 4, "algo.update.epochs": 2}, 1,
    ),
    "verl's KL in the loss": (
        "verl grpo", {"actor.use_kl_loss": True, "model.path": "m"},
        {"algo.kl.coefficient": 0.001, "ref.path": "m", "algo.kl.estimator": ...}, 1,
    ),
    "verl's KL in the reward": (
        "verl grpo", {"algorithm.use_kl_in_reward": True, "algorithm.kl_ctrl.kl_coef": 0.1},
        {"algo.kl.coefficient": 0.1, "algo.kl.place": "reward", "algo.kl.estimator": "k1"}, 1,
    ),
    "verl's PPO": (
        "verl ppo", {"critic.model.path": "c", "critic.optim.lr": 2e-5},
        {"critic.path": "c", "critic.head": "scalar", "algo.critic_optimizer.lr": 2e-5, "algo.critic_optimizer.head_lr": 2e-5,
         "algo.kl.kind": "fixed", "algo.kl.coefficient": 0.0, "algo.lam": 1.0, "algo.value_clip": 0.5}, 1,
    ),
    "verl's steps are of several optimizer steps": (
        "verl grpo", {"actor.optim.lr_warmup_steps": 10, "data.train_batch_size": 64, "actor.ppo_mini_batch_size": 16},
        {"algo.optimizer.warmup_steps": 40}, 1,
    ),
    "overlong prompts": ("verl grpo", {"data.truncation": "left"}, {"prompts.overlong_prompts": "keep_end", "held_out.overlong_prompts": "keep_end"}, 1),
    "a custom reward function": (
        "verl grpo", {"custom_reward_function.path": "my.py", "custom_reward_function.name": "f"},
        {"reward.functions": {"score": {"function": "my.py:f", "signature": "verl"}}}, 1,
    ),
    "a value that is another option's": ("verl grpo", {"rollout.temperature": "${actor_rollout_ref.rollout.top_p}", "rollout.top_p": 0.5}, {"algo.sampling.temperature": 0.5}, 1),
    "TRL's models compute in bfloat16 by default": ("trl grpo", {"dtype": "float32"}, {"actor.dtype": ...}, 1),
    "TRL without bf16 computes in the format of the model": ("trl grpo", {"bf16": False}, {"actor.dtype": "float32"}, 1),
    "TRL's format of a model, by its older name": ("trl grpo", {"bf16": False, "torch_dtype": "bfloat16"}, {"actor.dtype": "bfloat16"}, 1),
    "a chat template": ("trl sft", {"chat_template_path": "mine.jinja"}, {"actor.chat_template": "mine.jinja"}, 1),
    "settings of chance": ("trl grpo", {"top_p": 0.5, "min_p": 0.1, "top_k": 9}, {"algo.sampling.top_p": 0.5, "algo.sampling.min_p": 0.1, "algo.sampling.top_k": 9}, 1),
    "TRL's greedy responses": ("trl rloo", {"temperature": 0.0, "top_p": 0.5, "top_k": 9}, {"algo.sampling.top_p": ..., "algo.sampling.top_k": ...}, 1),
    "verl's greedy responses": ("verl ppo", {"rollout.do_sample": False, "rollout.top_p": 0.5, "rollout.top_k": 9}, {"algo.sampling.temperature": 0.0, "algo.sampling.top_p": ..., "algo.sampling.top_k": ...}, 1),
    "verl's settings of chance": ("verl ppo", {"rollout.top_p": 0.5}, {"algo.sampling.top_p": 0.5}, 1),
    "OpenRLHF's greedy responses": ("openrlhf ppo", {"rollout.temperature": 0.0, "rollout.top_p": 0.5}, {"algo.sampling.top_p": ...}, 1),
    "OpenRLHF's settings of chance": ("openrlhf ppo", {"rollout.top_p": 0.5}, {"algo.sampling.top_p": 0.5}, 1),
    "OpenRLHF's batch is of responses": (
        "openrlhf grpo", {"rollout.batch_size": 128, "rollout.n_samples_per_prompt": 8, "train.batch_size": 256, "algo.advantage.estimator": "group_norm"},
        {"algo.batch_size": 128, "algo.update.mini_batches": 4, "algo.samples_per_prompt": 8, "algo.advantage": "grpo"}, 1,
    ),
    "OpenRLHF's critic is the reward model": (
        "openrlhf ppo", {"actor.model_name_or_path": "a", "reward.model_name_or_path": "r"},
        {"critic.path": "r", "reward.path": "r", "reward.head": "scalar", "ref.path": "a"}, 1,
    ),
    "TRL's adapter, of its own defaults": (
        "trl grpo", {"use_peft": True}, {"actor.adapter.rank": 16, "actor.adapter.alpha": 32, "actor.adapter.target_modules": ["q_proj", "v_proj"], "actor.adapter.rslora": ...}, 1,
    ),
    "TRL's adapter of a reward model": (
        "trl reward", {"use_peft": True, "lora_r": 8, "lora_alpha": 16, "use_rslora": True, "lora_target_modules": "all-linear"},
        {"reward.adapter.rank": 8, "reward.adapter.alpha": 16, "reward.adapter.target_modules": ["all-linear"], "reward.adapter.rslora": True}, 1,
    ),
    "TRL's reference that follows": (
        "trl dpo", {"sync_ref_model": True, "ref_model_sync_steps": 64, "ref_model_mixup_alpha": 0.3},
        {"algo.follow.every": 64, "algo.follow.share": 0.3}, 1,
    ),
    "TRL's reference that stays": ("trl grpo", {"ref_model_sync_steps": 64}, {"algo.follow.every": ..., "algo.follow.share": ...}, 1),
    "TRL without an adapter": ("trl sft", {"lora_r": 8}, {"actor.adapter.rank": ..., "actor.adapter.target_modules": ...}, 1),
    "verl's adapters": (
        "verl ppo", {"model.lora_rank": 8, "model.target_modules": ["q_proj"], "critic.model.lora_rank": 4, "model.lora_adapter_path": "sft"},
        {"actor.adapter.rank": 8, "actor.adapter.alpha": 16, "actor.adapter.target_modules": ["q_proj"], "actor.adapter.path": "sft", "critic.adapter.rank": 4}, 1,
    ),
    "OpenRLHF's adapter is of every model that is trained": (
        "openrlhf ppo", {"ds.lora.rank": 8}, {"actor.adapter.rank": 8, "critic.adapter.rank": 8, "actor.adapter.alpha": 16, "actor.adapter.target_modules": ["all-linear"]}, 1,
    ),
    "cDPO": ("openrlhf dpo", {"model.label_smoothing": 0.1}, {"algo.loss": "cdpo", "algo.label_smoothing": 0.1}, 1),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_options_become_parameters(case):
    """`...` stands for a parameter at our default, which the file leaves out."""
    name, options, expected, devices = CASES[case]
    found = values(translated(name, options, devices))
    assert {path: found.get(path, ...) for path in expected} == expected


REFUSED = {
    "trl grpo": {
        "loss_type": ("sapo", "no loss here is sapo"), "packing": (True, ""), "use_dora": (True, "only plain adapters"),
        "warmup_ratio": (0.1, "state --rows"), "num_train_epochs": (0.5, "0.5 is not a whole number of passes"),
        "lr_scheduler_type": ("polynomial", "only these have a counterpart: constant"),
        "dtype": ("float16", "training in float16 is not possible here"),
        "temperature": (3.0, "algo.sampling.temperature: got 3.0, expected at most 2"),
        "learning_rate": ([1], "algo.optimizer.lr: got [1]"), "entropy_coef": (0.1, "an entropy bonus"),
        "generation_kwargs": ({"num_beams": 2}, "num_beams has no counterpart"), "report_to": ("comet_ml", "the trackers here"),
        "max_tool_calling_iterations": (3, "play.max_turns: 4"), "num_generations": (7, ""),
    },
    "trl sft": {"chat_template_path": ("Qwen/Qwen3-0.6B", "the chat_template.jinja of that model"), "packing": (True, "rows are never packed"), "assistant_only_loss": (False, "only the assistant's turns are learned"), "completion_only_loss": (False, "only the completion is learned"), "loss_type": ("dft", "no loss here is dft"), "max_length": (1024, "rows for training are never cut"), "average_tokens_across_devices": (False, "over the tokens of all devices")},
    "trl dpo": {"loss_type": (["sigmoid", "ipo"], "sigmoid + ipo"), "label_smoothing": (0.1, "")},
    "verl ppo": {
        "rollout.n": (8, "a single response"), "critic.ppo_epochs": (3, "actor and critic"),
        "actor.use_kl_loss": (True, "subtracted from the reward"), "trainer.critic_warmup": (5, "critic alone"),
        "data.train_files": (["a", "b"], "a pattern"), "actor.clip_ratio_high": (0.28, "both sides alike"),
    },
    "verl grpo": {"data.shuffle": (False, "each pass has its own order"), "algorithm.adv_estimator": ("opo", "no advantage here is opo"), "actor.kl_loss_type": ("k1", "")},
    "openrlhf dpo": {"model.ipo_enable": (True, "means over tokens")},
}  # fmt: skip


@pytest.mark.parametrize(
    ("name", "option", "value", "why"),
    [(name, option, *case) for name, cases in REFUSED.items() for option, case in cases.items() if case[1]],
)
def test_an_option_without_counterpart_is_refused_with_a_reason(name, option, value, why):
    one = outcome(translated(name, {option: value}), option)
    assert one.what == "refused" and why in one.why


@pytest.mark.parametrize(
    ("option", "value", "why"),
    [
        ("assistant_only_loss", True, "here too only the assistant's turns of chats are learned"),
        ("completion_only_loss", True, "the default here too"),
        ("max_length", None, "off"),
        ("average_tokens_across_devices", True, "the default here too"),
    ],
)
def test_what_is_so_here_too_is_not_refused(option, value, why):
    one = outcome(translated("trl sft", {option: value}), option)
    assert (one.what, one.why) == ("without effect", why)


MINI_BATCHES = {"steps_per_generation": 2, "num_generations": 2}
UNLIKE = {
    "bnpo": ("loss_type", {"loss_type": "bnpo"}, TRL_BATCH, "TRL takes the mean of micro-batches' means"),
    "dapo": ("loss_type", {"loss_type": "dapo"}, MINI_BATCHES, "TRL divides by a generation's tokens"),
    "k2": ("use_bias_correction_kl", {"use_bias_correction_kl": True, "beta": 0.1}, {"num_iterations": 2}, "about the gradient"),
    "masked": ("mask_truncated_completions", {"mask_truncated_completions": True}, {"loss_type": "grpo"}, "counts them too"),
}  # fmt: skip


@pytest.mark.parametrize("name", UNLIKE)
def test_what_differs_although_the_settings_are_equal_is_said_where_it_does(name):
    option, stated, other, why = UNLIKE[name]
    (alike,) = outcome(translated("trl grpo", stated), option).made[-1:]
    (unlike,) = outcome(translated("trl grpo", stated | other), option).made[-1:]
    assert (why in alike.rule.note, why in unlike.rule.note) == (False, True)
    assert (alike.path, name == "masked" or alike.value) == (unlike.path, name == "masked" or unlike.value)


def test_prompts_of_a_batch_that_are_no_whole_number_are_refused_with_the_numbers():
    one = outcome(translated("trl grpo", {"num_generations": 7}), "per_device_train_batch_size")
    assert one.why == "algo.batch_size = 8 * max(1, 1) * 1 / 7 is not a whole number; state --devices"


def test_a_share_of_the_run_follows_from_the_rows():
    found = translated(
        "trl grpo", TRL_BATCH | {"num_train_epochs": 2, "warmup_ratio": 0.1, "save_strategy": "epoch"}, rows=800
    )
    assert values(found)["algo.optimizer.warmup_steps"] == 40  # 800 prompts, 4 in a step, twice: 400 steps
    assert values(found)["checkpoint_every"] == 200


def test_defaults_that_are_not_ours_are_in_the_file_and_are_told():
    found = translated("trl grpo", {})
    assert values(found)["algo.kl.coefficient"] == 0.0 and values(found)["algo.sampling.max_new_tokens"] == 512
    told = {each.option for each in found.of_defaults}
    assert {"beta", "loss_type", "max_completion_length", "lr_scheduler_type", "adam_beta1", "num_train_epochs"} <= told


def test_a_dump_of_every_option_tells_what_somebody_chose():
    """The options at their defaults are counted, and those that are not ours are told once."""
    (dialect,) = [one for one in every_dialect() if (one.library, one.trainer) == ("trl", "grpo")]
    found = translated("trl grpo", dict(dialect.defaults) | {"learning_rate": 5e-6})
    assert [each.option for each in found.outcomes] == ["learning_rate"]
    assert {"beta", "loss_type"} <= {each.option for each in found.of_defaults}
    assert values(found) == values(translated("trl grpo", {"learning_rate": 5e-6}))


def test_missing_values_are_left_to_fill_in():
    gaps = translated("trl grpo", {"beta": 0.1}).to_fill_in
    assert {"actor.path", "ref.path", "prompts.path", "held_out.path", "reward"} == set(gaps)
    assert set(translated("trl grpo", {"model_name_or_path": "m", "dataset_name": "d.jsonl", "reward_funcs": ["a.b"]}).to_fill_in) == {
        "held_out.path", "held_out.split_column",
    }  # fmt: skip
