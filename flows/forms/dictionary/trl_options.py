"""TRL 1.16: its trainers, and its options without a counterpart here."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cache
from types import MappingProxyType
from typing import Any

from prefect_rlhf.flows.forms.dictionary.dialect import Dialect, Refusal, keys, known
from prefect_rlhf.flows.forms.dictionary.job import Job
from prefect_rlhf.flows.forms.dictionary.rule import Rule, Untranslatable, Unused, only
from prefect_rlhf.flows.forms.dictionary.shared import (
    ADAPTER,
    NO_DROPOUT,
    NOT_QUANTISED,
    PLAN,
    TRAINED_POLICY,
    YOUR_FILE,
    listed,
)
from prefect_rlhf.flows.forms.dictionary.trl_rules import (
    BATCH,
    BATCH_OF_RATED,
    FOLLOW,
    GENERATION,
    MEANS,
    REFERENCE,
    model,
    only_losses,
    optimizer,
    rows,
    run,
)
from prefect_rlhf.tasks.rl.settings.policy import CLIPS

LOSSES = {"grpo": "clip", "bnpo": "clip", "dapo": "clip", "dr_grpo": "clip", "cispo": "cispo"}
SCALES = {"group": "grpo", True: "grpo", "none": "dr_grpo", False: "dr_grpo"}
PAIR_LOSSES = {"sigmoid": "dpo", "ipo": "ipo", "robust": "robust"}


def _mean_over(job: Job) -> Any:
    mean = MEANS.get(str(job["loss_type"]))
    return job[mean] if mean == "max_completion_length" else mean


def _loss(job: Job) -> str:
    name, level = str(job["loss_type"]), job["importance_sampling_level"]
    if name not in LOSSES:
        raise Untranslatable(f"no loss here is {name}; known are {', '.join(LOSSES)}")
    if level == "sequence" and name == "cispo":
        raise Untranslatable("cispo takes each token's ratio here")
    return "gspo" if level == "sequence" else LOSSES[name]


def _clip(job: Job, option: str, side: int) -> Any:
    """A bound of the ratio; none if it is ours already. In cispo TRL states the bound itself, without the 1."""
    loss = job.here("algo.loss")
    value = job[option] if job[option] is not None else job["epsilon"]
    if loss == "cispo" and side == 0:
        raise Unused("cispo has no lower bound")
    if loss == "cispo":
        value = round(value - 1, 9)
    is_stated = job.differs(option) or job.differs("epsilon")
    return value if is_stated or value != CLIPS[loss][side] else None


def _advantage(job: Job) -> str | None:
    if job["multi_objective_aggregation"] == "normalize_then_sum":
        return "gdpo"
    scale = job["scale_rewards"]
    if scale not in SCALES:
        raise Untranslatable(f"no advantage here is scaled by {scale}; use group or none")
    return SCALES[scale]


def _is_corrected(job: Job) -> bool:
    """Whether TRL corrects for the difference between the engines: only where vLLM generates."""
    return bool(job["use_vllm"] and job["vllm_importance_sampling_correction"])


def _importance(job: Job) -> dict[str, Any]:
    level, _, beyond = str(job["vllm_importance_sampling_mode"]).partition("_")
    cap = job["vllm_importance_sampling_cap"]
    highest = job["vllm_importance_sampling_clip_max"] if cap is None else cap
    lowest = job["vllm_importance_sampling_clip_min"] or 0.0
    return {"level": level, "beyond": beyond, "highest": 1e6 if highest is None else highest, "lowest": lowest}


def _part_of_importance(part: str) -> Callable[[Job], Any]:
    return lambda job: _importance(job)[part]


def _is_split(job: Job) -> bool:
    """Whether the responses of a generation are for several optimizer steps."""
    return bool((job["steps_per_generation"] or 0) > (job["gradient_accumulation_steps"] or 1))


def _has_ratios(job: Job) -> bool:
    """Whether ratios are not 1, so their weights count, or are of whole responses, so their gradients differ."""
    return _is_split(job) or job["num_iterations"] > 1 or job["importance_sampling_level"] == "sequence"


def _is_of_micro_batches(job: Job) -> bool:
    return job["loss_type"] == "bnpo" and (job["gradient_accumulation_steps"] > 1 or job.devices > 1)


def _is_of_a_generation(job: Job) -> bool:
    is_one_step = job["steps_per_generation"] == job["gradient_accumulation_steps"]
    return job["loss_type"] in ("dapo", "cispo") and not is_one_step


def _pair_loss(job: Job) -> str | None:
    names = [str(name) for name in listed(job["loss_type"])]
    if len(names) != 1 or names[0] not in PAIR_LOSSES:
        raise Untranslatable(f"no loss here is {' + '.join(names)}; there are {', '.join(PAIR_LOSSES)}")
    return PAIR_LOSSES[names[0]]


def _assistant_only(job: Job) -> None:
    """Say that this changes nothing here. In TRL the default learns every turn of a chat; see `_CHATS`."""
    if job["assistant_only_loss"]:
        raise Unused("here too only the assistant's turns of chats are learned")


UNLIKE_MEANS = (
    ("TRL takes the mean of micro-batches' means", _is_of_micro_batches),
    ("TRL divides by a generation's tokens, scaled to an optimizer step", _is_of_a_generation),
)
"""Means that differ from ours of the same name: how, and in which jobs."""
GROUPS: tuple[Rule, ...] = (
    Rule("algo.advantage", "scale_rewards multi_objective_aggregation", by=_advantage),
    Rule("algo.loss", "loss_type importance_sampling_level", by=_loss, words=LOSSES),
    *(
        Rule("algo.mean_over", "loss_type | max_completion_length", note, by=_mean_over, words=MEANS, when=when)
        for note, when in (*UNLIKE_MEANS, ("", None))
    ),
    Rule("algo.clip_low", "epsilon | loss_type", by=lambda job: _clip(job, "epsilon", 0)),
    Rule("algo.clip_high", "epsilon_high epsilon | loss_type", by=lambda job: _clip(job, "epsilon_high", 1)),
    Rule("algo.kl.coefficient", "beta"),
    Rule(
        "algo.kl.estimator",
        "use_bias_correction_kl | beta",
        "TRL's correction is the ratio: about the gradient of k2. Without it, k3 is the same in both",
        by=lambda job: "k2",
        when=lambda job: job["beta"] and job["use_bias_correction_kl"] and _has_ratios(job),
    ),
    Rule(
        "algo.kl.estimator",
        "use_bias_correction_kl | beta",
        "with the correction, TRL's KL has the gradient of k2",
        by=lambda job: "k2" if job["use_bias_correction_kl"] else "k3",
        when=lambda job: bool(job["beta"]),
        otherwise="beta is 0",
    ),
    *(
        Rule(
            f"algo.importance.{part}",
            f"{options} | use_vllm",
            by=_part_of_importance(part),
            when=_is_corrected,
            otherwise="TRL corrects only with use_vllm and vllm_importance_sampling_correction",
        )
        for part, options in (
            ("level", "vllm_importance_sampling_mode vllm_importance_sampling_correction"),
            ("beyond", "vllm_importance_sampling_mode"),
            ("highest", "vllm_importance_sampling_clip_max vllm_importance_sampling_cap"),
            ("lowest", "vllm_importance_sampling_clip_min"),
        )
    ),
)
NLL = (
    only_losses("nll", "chunked_nll"),
    Rule("", "assistant_only_loss", by=_assistant_only, where="check"),
    only("completion_only_loss", None, True, why="of a prompt with a completion only the completion is learned here"),
)
LEAVE_ONE_OUT: tuple[Rule, ...] = (
    Rule("algo.advantage", "", "the trainer is RLOO's", by=lambda job: "rloo"),
    Rule("algo.mean_over", "", "RLOO's loss sums over a response", by=lambda job: 1.0),
    Rule("algo.clip_low", "epsilon", "of each token's ratio; in TRL of their product"),
    Rule("algo.clip_high", "epsilon_high epsilon", by=lambda job: job["epsilon_high"] or job["epsilon"]),
    Rule("algo.kl.coefficient", "beta"),
    Rule(
        "algo.kl.place", "| beta", "RLOO subtracts it from the reward", by=lambda job: "reward" if job["beta"] else None
    ),
    Rule("algo.kl.estimator", "| beta", "RLOO's KL is the log-ratio", by=lambda job: "k1" if job["beta"] else None),
)
PAIRS: tuple[Rule, ...] = (
    Rule("algo.loss", "loss_type", by=_pair_loss, words=PAIR_LOSSES),
    Rule("algo.beta", "beta", by=lambda job: job["beta"] if job.differs("beta") else None),
    Rule(
        "algo.label_smoothing",
        "label_smoothing | loss_type",
        when=lambda job: "robust" in listed(job["loss_type"]),
        otherwise="TRL 1.16 reads it with losses robust and exo_pair alone",
        by=lambda job: job["label_smoothing"],
    ),
)
REWARD: tuple[Rule, ...] = (
    Rule("algo.centering", "center_rewards_coefficient"),
    Rule(
        "algo.optimizer.head_lr", "| learning_rate", "TRL's head has the same rate", by=lambda job: job["learning_rate"]
    ),
)
RATED: tuple[Rule, ...] = (
    only_losses("kto"),
    Rule("algo.beta", "beta"),
    Rule("algo.good_weight", "desirable_weight"),
    Rule("algo.bad_weight", "undesirable_weight"),
)
_REFUSED: Mapping[str, str] = MappingProxyType(
    {
        ADAPTER: "peft_config lora lora_target_parameters lora_modules_to_save use_dora",
        NO_DROPOUT: "lora_dropout",
        NOT_QUANTISED: "load_in_8bit bnb_4bit_quant_storage bnb_4bit_compute_dtype",
        TRAINED_POLICY: "repetition_penalty logit_bias vllm_structured_outputs_regex vllm_guided_decoding_regex",
        "no loss here has an entropy bonus; actor_train.entropy is a metric": (
            "entropy_coef use_adaptive_entropy entropy_coef_min entropy_coef_max entropy_coef_delta entropy_target"
        ),
        "no loss here has it; docs/authoring.md shows how to add your own": (
            "delta sapo_temperature_neg sapo_temperature_pos vespo_k_pos vespo_lambda_pos vespo_k_neg"
            " vespo_lambda_neg top_entropy_quantile off_policy_mask_threshold loss_weights ld_alpha f_divergence_type"
            " f_alpha_divergence_coef use_weighting discopop_tau rpo_alpha normalize_advantages reward_clip_range"
            " label_smoothing_factor"
        ),
        "the share of experts' balance is not in a loss here: mixtures are only planned": "router_aux_loss_coef",
        "AdamW is the only optimizer here": "optim_args optim_target_modules",
        "the last layer has the format of actor.dtype": "cast_lm_head_to_fp32",
        "no noise is added to embeddings": "neftune_noise_alpha",
        "code in a model's folder is not run": "trust_remote_code",
        "write the template into a file, which actor.chat_template names": "chat_template",
        "the keywords of a model are not passed on; actor.dtype is there": "model_init_kwargs",
        "a checkpoint of TRL cannot be resumed; actor.path may be its model": "resume_from_checkpoint",
        "state best_metric, such as record_evaluation.score, and best_is: metrics have other names here": (
            "load_best_model_at_end metric_for_best_model greater_is_better"
        ),
        "state the path of a single dataset; several are joined beforehand": (
            "datasets dataset_mixture dataset_mixer dataset_weights test_split_size"
        ),
        "whole files are read, no streams": "dataset_streaming streaming",
        "rows are prepared as docs/data.md says": "dataset_kwargs",
        "callbacks do not exist here; docs/automations.md reacts to metrics": "callbacks",
        "state patience: evaluations without improvement, after which a run ends": "EarlyStoppingCallback",
    }
)
_WITHOUT_EFFECT: Mapping[str, str] = MappingProxyType(
    {
        "every step is logged": "logging_strategy logging_steps logging_first_step logging_nan_inf_filter"
        " log_on_each_node log_level log_level_replica disable_tqdm include_num_input_tokens_seen logging_dir"
        " include_for_metrics batch_eval_metrics prediction_loss_only include_tokens_per_second",
        "the model's head says it": "lora_task_type",
        "a run has its own name": "run_name wandb_entity wandb_run_group trackio_space_id trackio_bucket_id"
        " trackio_static_space_id",
        "a run uploads nothing; its models are Hugging Face folders": "push_to_hub hub_model_id hub_strategy hub_token"
        " hub_private_repo hub_always_push hub_revision log_completions_hub_repo push_to_hub_revision"
        " push_to_hub_model_id",
        "vLLM generates; the plan places it": "use_vllm vllm_mode vllm_model_impl vllm_enable_sleep_mode"
        " vllm_server_base_url vllm_server_host vllm_server_port vllm_group_port vllm_device vllm_dtype"
        " vllm_server_timeout cache_implementation use_transformers_continuous_batching"
        " transformers_continuous_batching_config use_transformers_paged ds3_gather_for_generation use_cache",
        "the plan states each call's memory": "vllm_gpu_memory_utilization vllm_max_model_length vllm_max_model_len",
        PLAN: "accelerate accelerator_config parallelism_config fsdp fsdp_config deepspeed ddp_find_unused_parameters"
        " ddp_bucket_cap_mb ddp_broadcast_buffers ddp_static_graph ddp_backend ddp_timeout"
        " gradient_checkpointing_kwargs"
        " activation_offloading torch_compile torch_compile_backend torch_compile_mode torch_empty_cache_steps"
        " auto_find_batch_size local_rank _n_gpu use_cpu no_cuda per_device_eval_batch_size eval_accumulation_steps"
        " precompute_ref_batch_size precompute_ref_log_probs padding_free pad_to_multiple_of remove_unused_columns"
        " dataloader_num_workers dataloader_pin_memory dataloader_persistent_workers dataloader_prefetch_factor"
        " dataloader_multiprocessing_context dataloader_in_order dataset_num_proc preprocessing_num_workers"
        " split_batches ignore_bias_buffers skip_memory_metrics debug",
        "the engines bring their own kernels": "attn_implementation use_liger_kernel liger_kernel_config tf32"
        " use_flash_attention_2",
        "an evaluation computes in actor.dtype": "bf16_full_eval fp16_full_eval",
        "a model is trained without dropout": "disable_dropout",
        "checkpoints are complete": "save_only_model save_on_each_node enable_jit_checkpoint"
        " restore_callback_states_from_checkpoint ignore_data_skip save_safetensors",
        "no file of an earlier run is overwritten": "overwrite_output_dir",
        "the first step is evaluated before it is trained": "eval_on_start eval_delay",
        "state a set: evaluation.NAME.samples and its temperature": "num_generations_eval",
        "a run trains, and evaluates its held-out rows": "do_train do_eval do_predict eval_do_concat_batches"
        " eval_use_gather_object",
        "steps are reproducible": "full_determinism data_seed",
        "rows are not padded": "pad_token label_names length_column_name group_by_length",
        "each pass has its own order; a step may span two passes": (
            "shuffle_dataset dataloader_drop_last train_sampling_strategy"
        ),
        "responses are text": "log_multimodal log_unique_prompts",
    }
)
_OFFLINE: Mapping[str, Refusal] = MappingProxyType(
    {
        "max_length": Refusal(
            "rows for training are never cut: a row that is too long for the context is refused", by_default=True
        ),
        "max_prompt_length": Refusal("rows for training are never cut"),
        "max_completion_length": Refusal("rows for training are never cut"),
        "truncation_mode": Refusal("rows for training are never cut"),
    }
)
_CHATS: Mapping[str, Refusal] = MappingProxyType(
    {
        "max_seq_length": Refusal("rows for training are never cut: a row that is too long for the context is refused"),
        **{
            name: Refusal(
                "rows are never packed, so algo.batch_size counts chats: multiply it by the chats of a packed row"
            )
            for name in ("packing", "packing_strategy", "eval_packing")
        },
        "assistant_only_loss": Refusal(
            "of chats only the assistant's turns are learned, as if it were true; of a text_column every token",
            by_default=True,
        ),
    }
)
_NEED: Mapping[str, tuple[Any, str]] = MappingProxyType({"actor.path": ("MODEL", "the model, which your script names")})
_REWARD = {"reward": {"function": f"{YOUR_FILE}:reward", "signature": "trl"}}


def _complete(values: dict[str, Any], devices: int) -> dict[str, Any]:
    """Return the batch of a generation, which follows from other options (`GRPOConfig.__post_init__`)."""
    rows, steps = values.get("generation_batch_size"), values.get("steps_per_generation")
    size, accumulated = values["per_device_train_batch_size"], values["gradient_accumulation_steps"]
    if not all(isinstance(value, int) and value > 0 for value in (size, accumulated)):
        return {}
    if steps is None:
        steps = max(1, rows // (size * devices)) if isinstance(rows, int) else accumulated
    return {"steps_per_generation": steps, "generation_batch_size": size * devices * steps if rows is None else rows}


def _dialect(
    trainer: str,
    flow: str,
    rules: tuple[Rule, ...],
    refused: Mapping[str, Refusal] = MappingProxyType({}),
    needs: Mapping[str, tuple[Any, str]] = _NEED,
) -> Dialect:
    generates = flow == "grpo"
    return Dialect(
        library="trl",
        trainer=trainer,
        defaults={**known("trl")["common"], **known("trl")[trainer]},
        rules=rules,
        refused={option: Refusal(reason) for option, reason in keys(_REFUSED).items()} | dict(refused),
        without_effect=keys(_WITHOUT_EFFECT) | {"optim": "AdamW is the optimizer"},
        flow=flow,
        needs=needs,
        own=frozenset(refused),
        complete=_complete if generates else lambda values, devices: {},
    )


@cache
def dialects() -> tuple[Dialect, ...]:
    """Return TRL's trainers."""
    shared = (*optimizer(), *run())
    of_prompts = rows("prompts", ("prompt_column", "dataset_prompt_column"))
    online = (*model("actor"), *of_prompts, *GENERATION, *shared, *REFERENCE, *FOLLOW)
    with_reward = {
        **_NEED,
        "prompts.path": ("DATASET", "the prompts, which your script names"),
        "held_out.path": ("", "prompts for evaluations: these are those of training"),
        "reward": ({"functions": _REWARD}, "the functions or the model that your script names"),
    }
    needs = {
        parameter: {
            **_NEED,
            f"{parameter}.path": ("DATASET", "the rows, which your script names"),
            "held_out.path": ("", "rows for evaluations: these are those of training"),
        }
        for parameter in ("pairs", "answers", "chats")
    }
    of_texts = {**_OFFLINE, **_CHATS}
    reward_needs = {name: need for name, need in needs["pairs"].items() if name != "actor.path"}
    reward_needs |= {"reward.path": _NEED["actor.path"]}
    trained = (*BATCH, *shared)
    compared = (*model("actor"), *REFERENCE, *FOLLOW)
    texts = rows("chats", ("text_column", "dataset_text_field"))
    rated = (*rows("answers"), *BATCH_OF_RATED, *shared, *RATED)
    scored = (*model("reward", "scalar"), *rows("pairs"))
    return (
        _dialect("grpo", "grpo", (*online, *GROUPS), needs=with_reward),
        _dialect("rloo", "grpo", (*online, *LEAVE_ONE_OUT), needs=with_reward),
        _dialect("dpo", "dpo", (*compared, *rows("pairs"), *trained, *PAIRS), _OFFLINE, needs["pairs"]),
        _dialect("kto", "kto", (*compared, *rated), _OFFLINE, needs["answers"]),
        _dialect("sft", "sft", (*model("actor"), *texts, *trained, *NLL), of_texts, needs["chats"]),
        _dialect("reward", "reward", (*scored, *trained, *REWARD), _OFFLINE, reward_needs),
    )
