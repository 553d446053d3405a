"""Options of TRL, verl and OpenRLHF, and the parameters here that replace them: the tables of docs/coming_from.md."""

from collections.abc import Mapping
from types import MappingProxyType

from prefect_rlhf.flows.forms.foreign_units import UNITS

_ROWS = {
    "algo.optimizer.lr": "learning_rate optim.lr actor_learning_rate critic_learning_rate",
    "algo.optimizer.schedule": "lr_scheduler_type optim.lr_scheduler_type optim.lr_decay_style lr_scheduler",
    "algo.optimizer.decay_steps": "max_steps optim.total_training_steps optim.lr_decay_steps",
    "algo.optimizer.min_lr_ratio": "lr_scheduler_kwargs optim.min_lr_ratio",
    "algo.optimizer.warmup_steps": "warmup_steps optim.lr_warmup_steps",
    "algo.optimizer.max_grad_norm": "max_grad_norm optim.clip_grad max_norm",
    "algo.optimizer.weight_decay": "weight_decay optim.weight_decay l2",
    "algo.optimizer.betas algo.optimizer.eps": "adam_beta1 adam_beta2 adam_epsilon optim.betas adam_betas",
    "algo.update.mini_batches": (
        "steps_per_generation gradient_accumulation_steps ppo_mini_batch_size train_batch_size"
    ),
    "algo.update.epochs": "num_iterations ppo_epochs max_epochs",
    "micro_batches=4": (
        "gradient_accumulation_steps per_device_train_batch_size ppo_micro_batch_size_per_gpu "
        "micro_train_batch_size micro_rollout_batch_size"
    ),
    "recompute=all": "gradient_checkpointing enable_gradient_checkpointing",
    "actor.dtype": "bf16 dtype",
    "algo.sampling.max_new_tokens": "max_completion_length data.max_response_length generate_max_len",
    "algo.sampling.temperature algo.sampling.top_p": "temperature top_p rollout.temperature rollout.top_p",
    "algo.sampling.top_k algo.sampling.min_p": "top_k min_p rollout.top_k",
    "algo.sampling.stop": "generation_kwargs",
    "algo.sampling.stop_at_eos": "rollout.ignore_eos",
    "algo.samples_per_prompt": "num_generations rollout.n n_samples_per_prompt",
    "engine=vllm tp2": (
        "use_vllm vllm_tensor_parallel_size rollout.name rollout.tensor_model_parallel_size vllm_num_engines"
    ),
    "play.tools": "tools multi_turn.tool_config_path",
    "play.signature": "environment_factory",
    "play.tool_format": "multi_turn.format",
    "play.max_turns": "max_tool_calling_iterations multi_turn.max_assistant_turns",
    "play.max_answer_tokens play.overlong_answers": (
        "multi_turn.max_tool_response_length multi_turn.tool_response_truncate_side"
    ),
    "play.workers": "agent.num_workers",
    "staleness": "trainer.v1.separate_async async_train",
    "prompts.path held_out.path": "train_dataset eval_dataset data.train_files data.val_files prompt_data",
    "prompts.prompt_column": "prompt data.prompt_key input_key",
    "algo.batch_size": (
        "generation_batch_size per_device_train_batch_size gradient_accumulation_steps data.train_batch_size "
        "rollout_batch_size"
    ),
    "epochs steps": "num_train_epochs trainer.total_epochs num_episodes",
    "prompts.max_prompt_length": "data.max_prompt_length prompt_max_len",
    "prompts.overlong_prompts": "data.truncation data.filter_overlong_prompts",
    "prompts.chat_template": "chat_template_path apply_chat_template",
    "prompts.chat_template_kwargs": "chat_template_kwargs data.apply_chat_template_kwargs",
    "actor.eos_token": "eos_token",
    "seed": "seed shuffle_dataset data.seed data.shuffle",
    "algo.kl.coefficient algo.kl.estimator algo.kl.place": (
        "beta use_kl_loss kl_loss_coef kl_loss_type init_kl_coef kl_estimator"
    ),
    "algo.kl.coefficient": "kl_coef algorithm.kl_ctrl.kl_coef init_kl_coef",
    "algo.kl.kind algo.kl.target algo.kl.horizon": "algorithm.kl_ctrl.type target_kl horizon kl_target kl_horizon",
    "algo.clip_low algo.clip_high": "epsilon epsilon_high clip_ratio_low clip_ratio_high eps_clip eps_clip_low_high",
    "algo.advantage": (
        "scale_rewards algorithm.adv_estimator algorithm.norm_adv_by_std_in_grpo advantage_estimator "
        "no_advantage_std_norm"
    ),
    "algo.mean_over": "loss_type loss_agg_mode",
    "algo.loss": "importance_sampling_level policy_loss.loss_mode policy_loss_type",
    "algo.importance.level algo.importance.highest": (
        "vllm_importance_sampling_mode algorithm.rollout_correction enable_vllm_is_correction "
        "vllm_is_truncated_threshold"
    ),
    "algo.overlong.mask": "mask_truncated_completions",
    "algo.over_sampling": "algorithm.filter_groups dynamic_filtering",
    "reward.functions": "reward_weights multi_objective_aggregation remote_rm_url",
    "algo.gamma algo.lam": "algorithm.gamma algorithm.lam gamma lambd",
    "algo.value_clip": "cliprange_value value_clip",
    "algo.loss algo.beta algo.label_smoothing": "loss_type beta label_smoothing",
    "steps": "max_steps trainer.total_training_steps",
    "algo.evaluate_every": "eval_strategy eval_steps trainer.test_freq",
    "best_metric best_is": "load_best_model_at_end metric_for_best_model greater_is_better",
    "patience": "EarlyStoppingCallback",
    "checkpoint_every keep_checkpoints": (
        "save_steps save_total_limit trainer.save_freq trainer.max_actor_ckpt_to_keep max_ckpt_num"
    ),
    "resume_from": "resume_from_checkpoint trainer.resume_mode trainer.resume_from_path load_checkpoint",
    "call_deadline_seconds role_deadlines": "vllm_server_timeout",
    "tracking.report_to tracking.project tracking.names": (
        "report_to run_name trainer.logger trainer.project_name use_wandb use_tensorboard wandb_project wandb_run_name"
    ),
    "tracking.samples tracking.samples_every": "log_completions trainer.log_val_generations",
    "output_dir": "output_dir trainer.default_local_dir save_path ckpt_path",
    "plan": (
        "accelerate n_gpus_per_node strategy actor_num_nodes actor_num_gpus_per_node colocate_all_models zero_stage"
    ),
}
OURS: Mapping[tuple[str, ...], tuple[str, ...]] = MappingProxyType(
    {tuple(ours.split()): tuple(theirs.split()) for ours, theirs in _ROWS.items()}
)
"""Our names and theirs, a row of the page each."""
_REASONS = {
    "no flow has a reference model that follows the actor": (
        "sync_ref_model ref_model_sync_steps ref_model_mixup_alpha enable_ema"
    ),
    "the trained log-probabilities would not be the policy's": "repetition_penalty logit_bias",
    "state optimizer steps: algo.optimizer.warmup_steps": "warmup_ratio lr_warmup_steps_ratio lr_warmup_ratio",
    "no loss here has an entropy bonus": "entropy_coef entropy_coeff entropy_loss_coef",
    "training rows are never truncated or packed": "max_length truncation_mode packing packing_samples",
    "adapters are not supported yet; all weights are trained": (
        "peft_config use_peft lora lora_r lora_rank lora_alpha lora_dropout load_in_4bit"
    ),
}
REFUSED: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {reason: tuple(theirs.split()) for reason, theirs in _REASONS.items()}
)
"""Reasons why a parameter does not exist here, with its names elsewhere."""
OF_A_PLAN = ("micro_batches=4", "recompute=all", "engine=vllm", "tp2")
OF_PPO: Mapping[str, str] = MappingProxyType({"algo.optimizer": "algo.actor_optimizer", "algo.clip_low": "algo.clip"})
"""The names that PPO has in place of GRPO's."""


def answer(option: str) -> str:
    """Return the parameters that replace an option of another trainer, or the reason why it has no replacement.

    The text is empty for any other word.

    >>> answer("--num_generations")
    'algo.samples_per_prompt'
    >>> answer("lora_rank")
    'adapters are not supported yet; all weights are trained'
    >>> answer("generation_batch_size")
    'algo.batch_size; algo.batch_size = generation_batch_size / num_generations: TRL counts responses'
    """
    word = option.lstrip("-").replace("-", "_")
    conversions = [text for theirs, text in UNITS.items() if word in (theirs, _last_part(theirs))]
    return "; ".join(text for text in (_named(word), *conversions) if text)


def _named(word: str) -> str:
    """Return our names for an option, or the reason why there are none."""
    for reason, theirs in REFUSED.items():
        if word in theirs:
            return reason
    rows = (ours for ours, theirs in OURS.items() if any(word in (one, _last_part(one)) for one in theirs))
    found = dict.fromkeys(name for ours in rows for name in ours)
    return ", ".join(name + _where(name) for name in found)


def _last_part(option: str) -> str:
    """Return the last part of an option if it is distinctive: `n` and `type` alone could be any option."""
    last = option.rpartition(".")[2]
    return last if "_" in last else option


def _where(name: str) -> str:
    """Return a note on a name: it belongs to a call in a plan, or PPO uses another name."""
    if name in OF_A_PLAN:
        return " for a call in a plan"
    for grpos, ppos in OF_PPO.items():
        if name == grpos or name.startswith(f"{grpos}."):
            return f" (for PPO {ppos}{name.removeprefix(grpos)})"
    return ""
