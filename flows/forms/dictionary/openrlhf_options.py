"""OpenRLHF 0.11: its programs, its options without a counterpart here, and the flat names of earlier versions."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from types import MappingProxyType
from typing import Any

from prefect_rlhf.flows.forms.dictionary.dialect import Dialect, Refusal, keys, known
from prefect_rlhf.flows.forms.dictionary.openrlhf_rules import (
    CHATS,
    GROUPS,
    OFFLINE,
    ONLINE,
    PAIRS,
    PPO,
    REWARD,
    adapter_of,
    optimizer,
)
from prefect_rlhf.flows.forms.dictionary.rule import Rule
from prefect_rlhf.flows.forms.dictionary.shared import (
    ENTROPY,
    MOVING_REFERENCE,
    NO_DROPOUT,
    NO_SUCH_LOSS,
    PLAN,
    TEMPLATE,
    YOUR_FILE,
)

_REFUSED: Mapping[str, str] = MappingProxyType(
    {
        NO_DROPOUT: "ds.lora.dropout",
        MOVING_REFERENCE: "train.enable_ema train.ema_beta",
        ENTROPY: "actor.entropy_coef",
        NO_SUCH_LOSS: "actor.dual_clip model.nll_loss_coef model.margin_loss_enable model.loss_type ptx_coef"
        " model.pretrain_mode_enable model.compute_fp32_loss_enable",
        "the share of experts' balance is not in a loss here: mixtures are only planned": (
            "actor.aux_loss_coef model.aux_loss_coef"
        ),
        "AdamW is the only optimizer here": "actor.optim critic.optim optim actor.muon.* critic.muon.* muon.*",
        "float16 is not trained here; bfloat16 and float32 are": "ds.param_dtype",
        "state prompts.system_prompt, or write the prompts as they are to be": "data.input_template",
        TEMPLATE: "data.tokenizer_chat_template",
        "a reward function reads every column of its row; docs/rewards.md": "data.label_key",
        "its functions take (queries, prompts, labels): give yours a signature of docs/rewards.md": (
            "reward.remote_url"
        ),
        "state a play: docs/environments.md": "train.agent_func_path",
        "a file is read whole": "data.max_samples train_split",
        "state the path of a single dataset; several are joined beforehand": "data.prompt_probs data.dataset_probs",
        "a checkpoint of OpenRLHF cannot be resumed; actor.path may be its model": "ckpt.load_enable",
        "no flow trains the critic alone first": "critic.freezing_steps",
        "groups whose scores are equal are dropped": "algo.dynamic_filtering_range",
        "a cut response has algo.overlong": "reward.stop_properly_penalty_coef",
        "scores have no bounds in a flow without a critic": "reward.clip_range",
        "scores are not normalised in a flow without a critic": "reward.normalize_enable",
        "the KL has a fixed coefficient in a flow without a critic": "algo.kl.target algo.kl.horizon",
        "it is 1 in a flow without a critic": "algo.advantage.gamma algo.advantage.lambd",
        "images are not read": "data.image_key data.max_images_per_prompt actor.freeze_visual_encoder",
        "state best_metric, such as record_evaluation.score": "ckpt.best_metric_key",
        "responses may be a step old, no more": "train.async_queue_size train.partial_rollout_enable"
        " rollout.vllm_generate_batch_size",
        "chats are learned as docs/data.md says": "data.multiturn",
        "the overlong penalty needs its buffer": "reward.overlong_penalty_factor reward.overlong_buffer_len",
        "only grpo has algo.over_sampling": "algo.dynamic_filtering_enable",
        "only grpo has another loss": "actor.policy_loss_type",
        "a model is at its folder, not in ModelScope": "use_ms",
    }
)
_WITHOUT_EFFECT: Mapping[str, str] = MappingProxyType(
    {
        "every step is logged": "logger.logging_steps perf",
        "a run has its own name": "logger.wandb.run_name logger.wandb.group logger.wandb.org",
        "a run's models are Hugging Face folders, and its checkpoints are complete": "ckpt.save_hf ckpt.disable_ds"
        " ckpt.max_mem ckpt.path critic.save_value_network ds.use_universal_ckpt",
        "state a set: evaluation.NAME.samples and its temperature": "eval.temperature eval.n_samples_per_prompt",
        "steps are reproducible": "train.full_determinism_enable",
        "rows are not padded": "ds.packing_samples",
        "a new scalar head has its own name": "ds.value_head_prefix",
        "it names the algorithm": "algo.advantage.estimator",
        "this algorithm has no critic": "critic.*",
        "it is the longest sequence of the model's context": "max_len",
        "the engines bring their own kernels": "ds.attn_implementation ds.experts_implementation ds.use_liger_kernel"
        " data.disable_fast_tokenizer",
        "the plan states each call's memory": "vllm.gpu_memory_utilization vllm.enable_sleep",
        "vLLM generates; the plan places it": "vllm.sync_backend vllm.sync_with_ray vllm.enable_prefix_caching"
        " vllm.enforce_eager",
        PLAN: "*.num_nodes *.num_gpus_per_node train.colocate_* local_rank ds.* *.gradient_checkpointing_reentrant"
        " data.dataloader_num_workers train.dynamic_batch_enable *.max_tokens_per_gpu ref.offload reward.offload"
        " actor_init_on_gpu ref_reward_offload colocate_*",
    }
)
_LONGEST = {
    "data.max_len": Refusal("rows for training are never cut: a row that is too long for the context is refused", True)
}
_BOUNDS = Refusal(
    "prompt and response have bounds of their own: prompts.max_prompt_length, algo.sampling.max_new_tokens"
)
_OLD = """
async_train:train.async_enable enable_ema:train.enable_ema ema_beta:train.ema_beta
async_queue_size:train.async_queue_size partial_rollout:train.partial_rollout_enable
colocate_actor_ref:train.colocate_actor_ref colocate_all_models:train.colocate_all
colocate_critic_reward:train.colocate_critic_reward num_episodes:train.num_episodes max_epochs:train.max_epochs
train_batch_size:train.batch_size micro_train_batch_size:train.micro_batch_size seed:train.seed
full_determinism:train.full_determinism_enable agent_func_path:train.agent_func_path
use_dynamic_batch:train.dynamic_batch_enable train_max_tokens_per_gpu:train.max_tokens_per_gpu
rollout_batch_size:rollout.batch_size micro_rollout_batch_size:rollout.micro_batch_size
n_samples_per_prompt:rollout.n_samples_per_prompt max_new_tokens:rollout.max_new_tokens
generate_max_len:rollout.max_new_tokens temperature:rollout.temperature top_p:rollout.top_p
rollout_max_tokens_per_gpu:rollout.max_tokens_per_gpu vllm_generate_batch_size:rollout.vllm_generate_batch_size
enable_vllm_is_correction:algo.advantage.is_correction_enable
vllm_is_truncated_threshold:algo.advantage.is_correction_threshold
vllm_is_correction_type:algo.advantage.is_correction_type advantage_estimator:algo.advantage.estimator
no_advantage_std_norm:algo.advantage.no_std_norm gamma:algo.advantage.gamma lambd:algo.advantage.lambd
kl_target:algo.kl.target kl_horizon:algo.kl.horizon init_kl_coef:algo.kl.init_coef kl_estimator:algo.kl.estimator
use_kl_loss:algo.kl.use_loss dynamic_filtering:algo.dynamic_filtering_enable
dynamic_filtering_reward_range:algo.dynamic_filtering_range eps_clip:actor.eps_clip
eps_clip_low_high:actor.eps_clip_low_high dual_clip:actor.dual_clip policy_loss_type:actor.policy_loss_type
entropy_loss_coef:actor.entropy_coef value_clip:critic.value_clip freezing_actor_steps:critic.freezing_steps
save_value_network:critic.save_value_network actor_learning_rate:actor.adam.lr critic_learning_rate:critic.adam.lr
reward_clip_range:reward.clip_range normalize_reward:reward.normalize_enable remote_rm_url:reward.remote_url
overlong_buffer_len:reward.overlong_buffer_len overlong_penalty_factor:reward.overlong_penalty_factor
stop_properly_penalty_coef:reward.stop_properly_penalty_coef reward_pretrain:reward.model_name_or_path
critic_pretrain:critic.model_name_or_path ref_pretrain:ref.model_name_or_path ref_offload:ref.offload
prompt_data:data.prompt_dataset prompt_data_probs:data.prompt_probs prompt_split:data.prompt_split
eval_dataset:eval.dataset eval_split:eval.split eval_temperature:eval.temperature eval_steps:eval.steps
eval_n_samples_per_prompt:eval.n_samples_per_prompt input_key:data.input_key output_key:data.output_key
label_key:data.label_key prompt_key:data.prompt_key chosen_key:data.chosen_key rejected_key:data.rejected_key
input_template:data.input_template apply_chat_template:data.apply_chat_template
tokenizer_chat_template:data.tokenizer_chat_template dataset:data.dataset dataset_probs:data.dataset_probs
dataset_split:data.dataset_split multiturn:data.multiturn max_len:data.max_len max_samples:data.max_samples
image_key:data.image_key max_images_per_prompt:data.max_images_per_prompt
freeze_visual_encoder:actor.freeze_visual_encoder disable_fast_tokenizer:data.disable_fast_tokenizer
dataloader_num_workers:data.dataloader_num_workers save_steps:ckpt.save_steps save_path:ckpt.output_dir
ckpt_path:ckpt.path save_hf_ckpt:ckpt.save_hf disable_ds_ckpt:ckpt.disable_ds max_ckpt_num:ckpt.max_num
max_ckpt_mem:ckpt.max_mem load_checkpoint:ckpt.load_enable best_metric_key:ckpt.best_metric_key
use_ds_universal_ckpt:ds.use_universal_ckpt logging_steps:logger.logging_steps use_wandb:logger.wandb.key
wandb_org:logger.wandb.org wandb_group:logger.wandb.group wandb_project:logger.wandb.project
wandb_run_name:logger.wandb.run_name use_tensorboard:logger.tensorboard_dir
vllm_num_engines:vllm.num_engines vllm_tensor_parallel_size:vllm.tensor_parallel_size
vllm_sync_backend:vllm.sync_backend vllm_sync_with_ray:vllm.sync_with_ray
vllm_gpu_memory_utilization:vllm.gpu_memory_utilization vllm_enable_sleep:vllm.enable_sleep
enable_prefix_caching:vllm.enable_prefix_caching enforce_eager:vllm.enforce_eager zero_stage:ds.zero_stage
deepcompile:ds.deepcompile param_dtype:ds.param_dtype zpg:ds.zpg adam_offload:ds.adam_offload
attn_implementation:ds.attn_implementation use_liger_kernel:ds.use_liger_kernel
grad_accum_dtype:ds.grad_accum_dtype overlap_comm:ds.overlap_comm deepspeed_enable_sleep:ds.enable_sleep
ds_tensor_parallel_size:ds.tensor_parallel_size packing_samples:ds.packing_samples load_in_4bit:ds.load_in_4bit
lora_rank:ds.lora.rank lora_alpha:ds.lora.alpha target_modules:ds.lora.target_modules lora_dropout:ds.lora.dropout
ring_attn_size:ds.ring_attn_size ring_head_stride:ds.ring_attn_head_stride value_head_prefix:ds.value_head_prefix
actor_num_nodes:actor.num_nodes actor_num_gpus_per_node:actor.num_gpus_per_node ref_num_nodes:ref.num_nodes
ref_num_gpus_per_node:ref.num_gpus_per_node critic_num_nodes:critic.num_nodes
critic_num_gpus_per_node:critic.num_gpus_per_node reward_num_nodes:reward.num_nodes
reward_num_gpus_per_node:reward.num_gpus_per_node beta:model.beta ipo:model.ipo_enable
label_smoothing:model.label_smoothing nll_loss_coef:model.nll_loss_coef margin_loss:model.margin_loss_enable
compute_fp32_loss:model.compute_fp32_loss_enable pretrain_mode:model.pretrain_mode_enable loss:model.loss_type
"""
_OF_MODELS = """
pretrain:model_name_or_path gradient_checkpointing:gradient_checkpointing_enable aux_loss_coef:aux_loss_coef
gradient_checkpointing_use_reentrant:gradient_checkpointing_reentrant
"""
_OF_OPTIMIZERS = """
learning_rate:adam.lr adam_betas:adam.betas l2:adam.weight_decay lr_scheduler:lr_scheduler
lr_warmup_ratio:lr_warmup_ratio min_lr_ratio:min_lr_ratio max_norm:max_norm
"""


@cache
def old_names(trainer: str) -> Mapping[str, tuple[str, ...]]:
    """Map the flat names used before 0.11 to the names of 0.11; an old option may have become two."""
    online = trainer in ("ppo", "grpo")
    models, prefixes = ("actor." if online else "model."), (("actor.", "critic.") if online else ("",))
    found = {old: (new,) for old, new in _pairs(_OLD)}
    found |= {old: (models + new,) for old, new in _pairs(_OF_MODELS)}
    return found | {old: tuple(prefix + new for prefix in prefixes) for old, new in _pairs(_OF_OPTIMIZERS)}


def _pairs(text: str) -> list[tuple[str, str]]:
    return [(pair.partition(":")[0], pair.partition(":")[2]) for pair in text.split()]


_REWARD = {"functions": {"reward": {"function": f"{YOUR_FILE}:reward"}}}


def _dialect(trainer: str, rules: tuple[Rule, ...], options: str, rows: str, role: str = "actor") -> Dialect:
    online = rows == "prompts"
    needs: dict[str, tuple[Any, str]] = {
        f"{role}.path": ("MODEL", "the model, which the file does not name"),
        f"{rows}.path": ("DATASET", "the rows, which the file does not name"),
        "held_out.path": ("", "rows for evaluations: these are those of training"),
        **({"reward": (_REWARD, "a function of yours, or a reward model")} if online else {}),
        **(
            {"algo.sampling.max_new_tokens": (1024, "the longest response, which the file leaves open")}
            if online
            else {}
        ),
    }
    refused = {option: Refusal(reason) for option, reason in keys(_REFUSED).items()} | {"data.max_len": _BOUNDS}
    if trainer == "grpo":
        refused["reward.clip_range"] = Refusal("scores have no bounds in a flow without a critic", True)
    return Dialect(
        library="openrlhf",
        trainer=trainer,
        defaults=known("openrlhf")[options],
        rules=(*rules, *adapter_of(role), *(adapter_of("critic") if trainer == "ppo" else ())),
        refused=refused | ({} if online else _LONGEST),
        without_effect=keys(_WITHOUT_EFFECT),
        flow=trainer,
        needs=needs,
    )


@cache
def dialects() -> tuple[Dialect, ...]:
    """Return OpenRLHF's trainers. PPO and GRPO are one program, told apart by `algo.advantage.estimator`."""
    both = (*optimizer("actor.", "algo.actor_optimizer"), *optimizer("critic.", "algo.critic_optimizer"))
    alone = optimizer("", "algo.optimizer")
    return (
        _dialect("ppo", (*PPO, *both, *ONLINE), "ppo", "prompts"),
        _dialect("grpo", (*GROUPS, *optimizer("actor.", "algo.optimizer"), *ONLINE), "ppo", "prompts"),
        _dialect("dpo", (*PAIRS, *alone, *OFFLINE), "dpo", "pairs"),
        _dialect("sft", (*CHATS, *alone, *OFFLINE), "sft", "chats"),
        _dialect("reward", (*REWARD, *alone, *OFFLINE), "reward", "pairs", "reward"),
    )


def trainer_of(options: Mapping[str, Any]) -> str:
    """Return which trainer the options of the first program ask for."""
    return "ppo" if options.get("algo.advantage.estimator", "gae") == "gae" else "grpo"
