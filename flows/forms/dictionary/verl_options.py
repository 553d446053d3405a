"""Trainers of verl 0.9, and the options of `ppo_trainer.yaml` without a counterpart here."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from types import MappingProxyType
from typing import Any

from prefect_rlhf.flows.forms.dictionary.dialect import Dialect, Refusal, keys, known
from prefect_rlhf.flows.forms.dictionary.rule import Rule
from prefect_rlhf.flows.forms.dictionary.shared import ADAPTER, ENTROPY, NO_SUCH_LOSS, PLAN, TEMPLATE
from prefect_rlhf.flows.forms.dictionary.verl_rules import (
    GROUPS,
    OF_ADAPTER,
    PENALTY,
    PPO,
    REMAX,
    SHARED,
    UPDATE,
    optimizer,
)

_REFUSED: Mapping[str, str] = MappingProxyType(
    {
        ADAPTER: "model.exclude_modules model.lora.* critic.model.exclude_modules critic.model.lora.*",
        ENTROPY: "actor.entropy_coeff",
        NO_SUCH_LOSS: "actor.tau_pos actor.tau_neg actor.policy_loss.* algorithm.use_pf_ppo algorithm.pf_ppo.*"
        " algorithm.rollout_correction.loss_type",
        TEMPLATE: "model.custom_chat_template critic.model.custom_chat_template",
        "AdamW is the only optimizer here": "*.optim.optimizer_impl *.optim.override_optimizer_config* *.optim.muon_*"
        " *.optim.use_layer_wise_distributed_optimizer",
        "main weights and moments are float32": "*.optim.use_precision_aware_optimizer *.optim.main_grads_dtype"
        " *.optim.exp_avg_dtype *.optim.exp_avg_sq_dtype",
        "a rate rises from 0 and falls once: algo.optimizer.schedule and algo.optimizer.min_lr_ratio": (
            "*.optim.num_cycles *.optim.warmup_style *.optim.lr_warmup_init *.optim.lr_wsd_decay_style"
            " *.optim.lr_wsd_decay_steps *.optim.lr_min *.optim.lr_start *.optim.lr_decay_ratio *.optim.decay_type"
            " *.optim.min_lr_factor *.optim.use_checkpoint_opt_param_scheduler *.optim.weight_decay_incr_style"
        ),
        "actor.dtype is the format of a model": "actor.fsdp_config.dtype critic.fsdp.dtype rollout.dtype",
        "a weight of the correction is cut at its bounds; rejected responses have importance.beyond: mask": (
            "algorithm.rollout_correction.*"
        ),
        "code in a model's folder is not run": "data.trust_remote_code model.trust_remote_code"
        " critic.model.trust_remote_code reward_model.model.trust_remote_code",
        "a model has the tokenizer and the configuration of its folder": "data.tokenizer model.tokenizer_path"
        " model.hf_config_path model.override_config* model.external_lib critic.model.tokenizer_path"
        " critic.model.hf_config_path critic.model.override_config* critic.model.external_lib"
        " reward_model.model.external_lib",
        "a dataset is read as docs/data.md says": "data.custom_cls.*",
        "a file is read whole": "data.train_max_samples data.val_max_samples",
        "no flow trains the critic alone first": "trainer.critic_warmup",
        "a checkpoint of verl cannot be resumed; actor.path may be its model": "trainer.resume_from_path",
        "prefect-rlhf evaluate measures a model without a run of training": "trainer.val_only",
        "state a set: evaluation.NAME.samples and its temperature": "rollout.val_kwargs.*",
        "rewards are functions or a model; docs/rewards.md": "reward.reward_manager.* reward_model.reward_manager"
        " reward_model.reward_loop_source reward_model.reward_loop_module_path reward_model.reward_loop_class_name"
        " sandbox_fusion.* reward_model.sandbox_fusion.* reward_model.use_reward_loop reward.sandbox_fusion.*"
        " reward_model.strategy reward_model.reward_kwargs.*",
        "a play is a function of yours; docs/environments.md": "rollout.multi_turn.* rollout.agent.*"
        " data.tool_config_path data.function_tool_path",
        "groups whose scores are equal are dropped, without a loop": "algorithm.filter_groups.*",
        "images and other media are not read": "data.image_key data.video_key data.audio_key data.image_patch_size"
        " data.mm_processor_kwargs data.return_multi_modal_inputs actor.freeze_vision_tower",
        "weights are not quantized": "rollout.quantization rollout.quantization_config_file rollout.qat* actor.qat.*"
        " ref.qat.* actor.fsdp_config.qat.* ref.fsdp_config.qat.* critic.fsdp.qat.*",
        "experts and further heads of tokens are not trained": "model.mtp.* critic.model.mtp.* rollout.mtp*"
        " *.router_replay.* rollout.enable_rollout_routing_replay",
        "no flow distils from a teacher; docs/authoring.md shows how to write one": "distillation.*",
        "responses may be a step old, no more": "trainer.v1.separate_async.* trainer.v1.colocate_async.*"
        " trainer.v1.sampler.* rollout.over_sample_rate",
        "name its column: prompts.columns: {data_source: COLUMN}": "data.reward_fn_key",
        "only grpo has algo.over_sampling": "data.gen_batch_size",
        "a step's rows are in the order of the dataset in each mini-batch": "actor.shuffle critic.shuffle",
    }
)
_WITHOUT_EFFECT: Mapping[str, str] = MappingProxyType(
    {
        "verl reads clip_ratio_low and clip_ratio_high": "actor.clip_ratio",
        "a rate falls over the run's steps, as in verl, which sets this itself": "*.optim.total_training_steps",
        "the first step has a rate above 0": "*.optim.zero_indexed_step",
        "a run has its own name": "trainer.experiment_name",
        "every step is logged": "rollout.disable_log_stats rollout.trace.* rollout.prometheus.*"
        " trainer.rollout_data_dir trainer.validation_data_dir rollout.moe_load_balance_metrics_interval"
        " actor.calculate_entropy actor.calculate_sum_pi_squared",
        "the first step is evaluated before it is trained": "trainer.val_before_train",
        "checkpoints are complete": "*.checkpoint.* trainer.default_hdfs_dir trainer.del_local_ckpt_after_load"
        " trainer.max_critic_ckpt_to_keep trainer.esi_redundant_time",
        "resume_from: latest resumes a run of prefect-rlhf": "trainer.resume_mode",
        "prefect-rlhf profile measures": "*.profiler.* global_profiler.* *.npu_profile.*",
        "steps are reproducible": "*.full_determinism *.data_loader_seed *.fsdp_config.seed critic.fsdp.seed"
        " rollout.seed",
        "vLLM generates; the plan places it": "rollout.mode rollout.load_format rollout.layered_summon"
        " rollout.skip_tokenizer_init rollout.engine_kwargs.* rollout.checkpoint_engine.* rollout.scheduling_policy"
        " rollout.multi_stage_wake_up rollout.calculate_log_probs rollout.logprobs_mode rollout.disaggregation.*"
        " model.use_shm critic.model.use_shm data.use_shm rollout.prompt_length rollout.response_length",
        "the plan states each call's memory": "*.gpu_memory_utilization *.free_cache_engine *.max_model_len"
        " *.max_num_seqs *.max_num_batched_tokens",
        "--devices of a run states them": "trainer.nnodes trainer.n_gpus_per_node",
        PLAN: "trainer.device trainer.balance_batch"
        " trainer.use_legacy_worker_impl trainer.use_v1 trainer.v1.sync"
        " trainer.ray_wait_register_center_timeout ray_kwargs.* transfer_queue.* hybrid_engine *nccl_timeout"
        " actor.fsdp_config.* ref.fsdp_config.* critic.fsdp.* critic.model.fsdp_config.* *.megatron.* *.veomni.*"
        " *.torchtitan.* *.mindspeed.* model_engine *.strategy *.use_torch_compile *.ulysses_sequence_parallel_size"
        " *.use_dynamic_bsz *.log_prob_use_dynamic_bsz *.use_remove_padding *.use_prefix_grouper"
        " *.enable_activation_offload *.tiled_mlp.* *.pad_to_length *.entropy_checkpointing *.entropy_from_logits_*"
        " *_max_token_len_per_gpu *.ppo_micro_batch_size *.ppo_micro_batch_size_per_gpu *.log_prob_micro_batch_size*"
        " critic.forward_micro_batch_size* *.rollout_n *.n_gpus_per_node *.nnodes rollout.data_parallel_size"
        " rollout.expert_parallel_size rollout.pipeline_model_parallel_size rollout.enforce_eager"
        " rollout.enable_chunked_prefill rollout.enable_prefix_caching rollout.cudagraph_capture_sizes"
        " critic.model.enable_gradient_checkpointing reward_model.model.fsdp_config.* reward_model.micro_batch_size*"
        " data.dataloader_num_workers data.filter_overlong_prompts_workers",
        "the engines bring their own kernels": "*.use_fused_kernels *.fused_kernel_options.* *.use_liger",
        "a reward model scores a row in one pass, on the devices of the plan": "reward_model.rollout.*"
        " reward.reward_model.rollout.* reward_model.enable_resource_pool reward.reward_model.enable_resource_pool",
        "reward.workers is the number of processes": "reward_model.num_workers reward.num_workers",
        "rows are read as docs/data.md says": "data.return_* data.val_batch_size data.validation_shuffle"
        " data.continuous_token.*",
        "it names the algorithm": "algorithm.adv_estimator",
        "this algorithm has a critic": "critic.enable",
        "of this algorithm, no group is compared": "algorithm.norm_adv_by_std_in_grpo",
        "the loss of this algorithm has none": "actor.kl_loss_coef actor.kl_loss_type *.loss_scale_factor"
        " actor.clip_ratio_low actor.clip_ratio_high",
        "a reference is not trained": "ref.optim.*",
        "Hydra itself reads it": "defaults hydra.* config-path config-name config_path config_name",
        "rows of a run are generated anew": "skip.*",
    }
)
_DUAL_CLIP = Refusal(
    "no loss here has a second clip; it acts where the advantage is negative and the ratio above clip_ratio_c", True
)
_GSM8K = {"score": {"function": "verl.utils.reward_score:default_compute_score", "signature": "verl"}}
_NEED: Mapping[str, tuple[Any, str]] = MappingProxyType(
    {"actor.path": ("MODEL", "the model"), "prompts.path": ("DATASET", "the rows"),
     "held_out.path": ("", "rows for evaluations: these are those of training"),
     "reward": ({"functions": _GSM8K}, "verl's score by data_source, where verl is installed, or a function of yours")}
)  # fmt: skip


def plain(option: str) -> str:
    """Return an option as the tables write it: without Hydra's marks and without its role's prefix.

    >>> plain("+actor_rollout_ref.rollout.n")
    'rollout.n'
    """
    return option.lstrip("+~").removeprefix("actor_rollout_ref.")


_WITHOUT_CRITIC = keys(
    {
        "this algorithm has no critic": "critic.*",
        "it is 1 without a critic": "algorithm.gamma algorithm.lam",
        "the coefficient is fixed without a critic": "algorithm.kl_ctrl.horizon algorithm.kl_ctrl.target_kl",
    }
)


def group_of(option: str) -> str:
    """Return the group of the file that an option is in.

    >>> group_of("+actor_rollout_ref.rollout.n")
    'actor_rollout_ref'
    """
    return option.lstrip("+~").partition(".")[0]


def _dialect(trainer: str, rules: tuple[Rule, ...]) -> Dialect:
    without = {} if trainer == "ppo" else _WITHOUT_CRITIC
    refused = {option: Refusal(reason) for option, reason in keys(_REFUSED).items()}
    return Dialect(
        library="verl",
        trainer=trainer,
        defaults=known("verl")["ppo"],
        rules=(*rules, *OF_ADAPTER, *SHARED),
        refused=refused | {"actor.clip_ratio_c": _DUAL_CLIP},
        without_effect=without | keys(_WITHOUT_EFFECT),
        flow=trainer,
        needs=_NEED,
    )


@cache
def dialects() -> tuple[Dialect, ...]:
    """Return verl's trainers: a single program, divided by `algorithm.adv_estimator`."""
    one = optimizer("actor", "algo.optimizer")
    both = (*optimizer("actor", "algo.actor_optimizer"), *optimizer("critic", "algo.critic_optimizer"))
    return (
        _dialect("ppo", (*UPDATE, *both, *PPO, *PENALTY)),
        _dialect("grpo", (*UPDATE, *one, *GROUPS)),
        _dialect("remax", (*one, *REMAX, *PENALTY)),
    )


def trainer_of(options: Mapping[str, Any]) -> str:
    """Return the trainer that the options ask for."""
    estimator = str(options.get("algorithm.adv_estimator", "gae"))
    return {"gae": "ppo", "remax": "remax"}.get(estimator, "grpo")
