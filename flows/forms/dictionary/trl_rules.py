"""Rules that translate the options of TRL 1.16's trainers."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from prefect_rlhf.flows.forms.dictionary.job import Job
from prefect_rlhf.flows.forms.dictionary.rule import NULL, Null, Rule, Untranslatable, Unused, only
from prefect_rlhf.flows.forms.dictionary.shared import (
    GREEDY,
    SCHEDULES,
    TRACKERS,
    adapter,
    files_of,
    functions_by_name,
    listed,
    passes,
)

UPDATES = "algo.update.mini_batches * algo.update.epochs"
OPTIMIZER_STEPS = "TRL counts optimizer steps"
MEANS = {"grpo": "rows", "bnpo": "tokens", "dapo": "tokens", "cispo": "tokens", "dr_grpo": "max_completion_length"}
"""The mean of each loss; of dr_grpo the option by which each row's sum is divided."""


def _lowest_rate(job: Job) -> Any:
    """The final learning rate as a share of the first."""
    stated = job["lr_scheduler_kwargs"]
    if not isinstance(stated, Mapping) or not stated:
        return None
    if others := stated.keys() - {"min_lr_rate", "min_lr"}:
        raise Untranslatable(f"{min(others)} has no counterpart; algo.optimizer.min_lr_ratio is the final rate")
    share: float | None = stated.get("min_lr_rate")
    return share if share is not None else stated["min_lr"] / job["learning_rate"]


def _is_share(option: str) -> Callable[[Job], bool]:
    """Whether an option is a share of the run's optimizer steps instead of a number of them."""
    return lambda job: isinstance(job[option], int | float) and 0 < job[option] < 1


def _is_number(option: str) -> Callable[[Job], bool]:
    return lambda job: isinstance(job[option], int | float) and not 0 < job[option] < 1


def _has_most_steps(job: Job) -> bool:
    return bool((job["max_steps"] or -1) > 0)


def _by(what: str, strategy: str) -> Callable[[Job], bool]:
    """Whether checkpoints or evaluations follow a strategy."""
    return lambda job: str(job[f"{what}_strategy"]) == strategy


def _dtype(job: Job) -> str | None:
    """The format of the computation: TRL's `bf16` is on by default, and without it a model computes in its own."""
    model = str(job["dtype"] if job["torch_dtype"] is None else job["torch_dtype"]).removeprefix("torch.")
    if job["fp16"] or model in ("float16", "half"):
        raise Untranslatable("training in float16 is not possible here; use bfloat16 or float32")
    return "float32" if job["bf16"] is False and model not in ("bfloat16", "auto") else "bfloat16"


def _four_bits(job: Job) -> str | None:
    """The format of a frozen base: here four bits are NF4, with double quantisation, below an adapter."""
    if not job["load_in_4bit"]:
        return None
    if not job["use_peft"]:
        raise Untranslatable("only a frozen base has four bits: set use_peft")
    if job["bnb_4bit_quant_type"] != "nf4" or not job["use_bnb_nested_quant"]:
        raise Untranslatable("four bits are nf4 with double quantisation here: use_bnb_nested_quant")
    return "nf4"


def _template(job: Job) -> str | None:
    """The file of a chat template, where TRL also takes the folder or the name of a model."""
    path = job["chat_template_path"]
    if path is not None and not str(path).endswith((".jinja", ".jinja2")):
        raise Untranslatable("here it is a file: the chat_template.jinja of that model")
    return None if path is None else str(path)


def _samples(job: Job) -> bool:
    """Whether a response depends on chance."""
    return bool(job["temperature"])


def _path(job: Job) -> Any:
    """The model, at its revision."""
    name, revision = job["model_name_or_path"], job["model_revision"]
    return f"{name}@{revision}" if name and revision not in (None, "main") else name


def _reference(job: Job) -> Any:
    """The reference is the model before training."""
    if job.flow == "grpo" and not job["beta"]:
        raise Unused("beta is 0, so no reference model is used")
    return _path(job)


def _reference_dtype(job: Job) -> str | None:
    """TRL loads the reference in the policy's format, and computes with it in the same precision."""
    return None if _reference(job) is None else _dtype(job)


def _stop(job: Job) -> list[str] | None:
    """Stop strings among the further arguments of generation, which have no other counterpart."""
    stated = job["generation_kwargs"]
    if not isinstance(stated, Mapping) or not stated:
        return None
    if others := stated.keys() - {"stop", "stop_strings"}:
        raise Untranslatable(f"{min(others)} has no counterpart; algo.sampling has all options")
    return listed(next(iter(stated.values())))


def _reward_model(job: Job) -> Any:
    if job["reward_model_name_or_path"] and job["reward_funcs"]:
        raise Untranslatable("a reward here is a model or functions; a function can call a server that runs the model")
    return job["reward_model_name_or_path"]


def reported(job: Job) -> list[str] | None:
    """Return a job's trackers."""
    names = [str(name) for name in listed(job["report_to"]) if name not in ("none", "all")]
    if others := [name for name in names if name not in TRACKERS]:
        raise Untranslatable(f"{others[0]}: the trackers here are {', '.join(sorted(set(TRACKERS.values())))}")
    return [TRACKERS[name] for name in names] or None


def optimizer() -> tuple[Rule, ...]:
    """Return the rules for AdamW and its learning rate."""
    path = "algo.optimizer"
    warmup, share = f"{path}.warmup_steps", f"* steps * {UPDATES}"
    return (
        Rule(f"{path}.lr", "learning_rate"),
        Rule(f"{path}.schedule", "lr_scheduler_type", words=SCHEDULES),
        Rule(f"{path}.min_lr_ratio", "lr_scheduler_kwargs | learning_rate", by=_lowest_rate),
        Rule(warmup, f"warmup_steps {share}", "if below 1", whole="about", when=_is_share("warmup_steps")),
        Rule(warmup, f"warmup_ratio {share}", whole="about", when=_is_share("warmup_ratio")),
        Rule(warmup, "warmup_steps", when=_is_number("warmup_steps")),
        Rule(f"{path}.max_grad_norm", "max_grad_norm", by=lambda job: job["max_grad_norm"] or 1e9),
        Rule(f"{path}.weight_decay", "weight_decay"),
        Rule(f"{path}.betas", "adam_beta1 adam_beta2", by=lambda job: [job["adam_beta1"], job["adam_beta2"]]),
        Rule(f"{path}.eps", "adam_epsilon"),
    )


def run() -> tuple[Rule, ...]:
    """Return the rules for a run's length, evaluations, checkpoints and trackers."""
    return (
        Rule(
            "epochs",
            "num_train_epochs | max_steps",
            by=lambda job: passes(job["num_train_epochs"]),
            when=lambda job: not _has_most_steps(job),
            otherwise="max_steps is stated",
        ),
        Rule(
            "steps",
            f"max_steps / ({UPDATES})",
            OPTIMIZER_STEPS,
            whole="about",
            when=_has_most_steps,
            otherwise="num_train_epochs counts",
        ),
        *_every("algo.evaluate_every", "eval"),
        *_every("checkpoint_every", "save"),
        Rule("keep_checkpoints", "save_total_limit"),
        Rule("recompute", "gradient_checkpointing", where="plan"),
        Rule("seed", "seed"),
        only("average_tokens_across_devices", True, why="a mean is over the tokens of all devices here"),
        Rule("output_dir", "output_dir"),
        Rule("tracking.report_to", "report_to", by=reported),
        Rule(
            "tracking.project",
            "project | report_to",
            by=lambda job: job["project"] if job.differs("project") else None,
            when=lambda job: bool(reported(job)),
            otherwise="report_to names no tracker",
        ),
        Rule(
            "tracking.project", "wandb_project", when=lambda job: bool(reported(job)), otherwise="no tracker is named"
        ),
    )


def _every(ours: str, what: str) -> tuple[Rule, ...]:
    steps, strategy = f"{what}_steps", f"{what}_strategy"
    by_steps, by_epoch = _by(what, "steps"), _by(what, "epoch")
    is_share = _is_share(steps)
    off = f"{strategy} is no"
    return (
        Rule(
            ours,
            f"{steps} / ({UPDATES})",
            OPTIMIZER_STEPS,
            whole="about",
            when=lambda job: by_steps(job) and not is_share(job),
            otherwise=off,
        ),
        Rule(
            ours,
            f"| {steps} {strategy}",
            by=lambda job: max(1, round(job[steps] * job.here("steps"))),
            when=lambda job: by_steps(job) and is_share(job),
            otherwise=off,
        ),
        Rule(ours, strategy, by=lambda job: job.steps_of_a_pass, when=by_epoch, otherwise="it is not by epoch"),
    )


def _always(value: Any) -> Callable[[Job], Any]:
    return lambda job: value


ADAPTER_OPTIONS = {
    "on": "use_peft",
    "rank": "lora_r",
    "alpha": "lora_alpha",
    "matrices": "lora_target_modules",
    "dropout": "lora_dropout",
    "rslora": "use_rslora",
}


def model(role: str, head: str | None = None) -> tuple[Rule, ...]:
    """Return the rules for the trained model."""
    made: tuple[tuple[str, Any], ...] = (("head", head), ("new_head", True)) if head else ()
    return (
        Rule(f"{role}.path", "model_name_or_path model_revision", by=_path),
        Rule(f"{role}.dtype", "bf16 fp16 dtype torch_dtype", "main weights are float32", by=_dtype),
        Rule(f"{role}.eos_token", "eos_token"),
        Rule(f"{role}.chat_template", "chat_template_path", by=_template),
        *(Rule(f"{role}.{name}", "", by=_always(value)) for name, value in made),
        *adapter(role, ADAPTER_OPTIONS, lambda job: bool(job["use_peft"]), "use_peft is false"),
        Rule(f"{role}.base_dtype", "load_in_4bit bnb_4bit_quant_type use_bnb_nested_quant | use_peft", by=_four_bits),
    )


def _moves(job: Job) -> bool:
    """Whether the reference follows the policy."""
    return bool(job["sync_ref_model"])


FOLLOW = (
    Rule(
        "algo.follow.every",
        f"ref_model_sync_steps / ({UPDATES})",
        OPTIMIZER_STEPS,
        whole="about",
        when=_moves,
        otherwise="sync_ref_model is false",
    ),
    Rule(
        "algo.follow.share",
        "ref_model_mixup_alpha sync_ref_model",
        by=lambda job: job["ref_model_mixup_alpha"],
        when=_moves,
        otherwise="sync_ref_model is false",
    ),
)
REFERENCE = (
    Rule("ref.path", "| model_name_or_path model_revision beta", by=_reference),
    Rule("ref.dtype", "| bf16 fp16 dtype torch_dtype beta", "TRL's reference has the policy's", by=_reference_dtype),
)


def rows(parameter: str, *columns: tuple[str, str]) -> tuple[Rule, ...]:
    """Return the rules for a dataset and its held-out rows; `columns` pairs our columns with theirs."""

    def split_column(job: Job) -> Null | None:
        return NULL if job["dataset_name"] else None

    def named(option: str) -> Callable[[Job], str | None]:
        return lambda job: files_of(job["dataset_name"], job[option], job["dataset_config"])

    def is_evaluated(job: Job) -> bool:
        return str(job["eval_strategy"]) != "no"

    off = "eval_strategy is no"
    both = [(name, when) for name, when in ((parameter, None), ("held_out", is_evaluated))]
    return (
        Rule(f"{parameter}.path", "dataset_name dataset_config dataset_train_split", by=named("dataset_train_split")),
        Rule(
            "held_out.path",
            "dataset_test_split | dataset_name",
            by=named("dataset_test_split"),
            when=is_evaluated,
            otherwise=off,
        ),
        *(
            Rule(f"{name}.split_column", "| dataset_name", by=split_column, when=when, otherwise=off)
            for name, when in both
        ),
        *(Rule(f"{name}.{ours}", theirs, when=when, otherwise=off) for ours, theirs in columns for name, when in both),
        *(
            Rule(f"{name}.end_of_text", "", "TRL ends every answer", by=lambda job: True, when=when, otherwise=off)
            for name, when in both
            if parameter == "pairs"
        ),
    )


def only_losses(*allowed: str) -> Rule:
    """Return a rule that accepts only these values of `loss_type`."""

    def check(job: Job) -> None:
        if job["loss_type"] not in allowed:
            raise Untranslatable(f"no loss here is {job['loss_type']}; only {' and '.join(allowed)}")

    return Rule("", "loss_type", by=check, where="check")


_BATCH = "per_device_train_batch_size * gradient_accumulation_steps * devices"
BATCH = (Rule("algo.batch_size", _BATCH),)
BATCH_OF_RATED = (
    Rule("algo.batch_size", _BATCH, "TRL estimates KTO's KL over per_device_train_batch_size rows of each device"),
)
GENERATION: tuple[Rule, ...] = (
    Rule("algo.samples_per_prompt", "num_generations"),
    Rule(
        "algo.batch_size",
        "generation_batch_size / num_generations",
        "TRL counts responses",
        when=lambda job: (
            job.differs("generation_batch_size") and job["steps_per_generation"] >= job["gradient_accumulation_steps"]
        ),
    ),
    Rule(
        "algo.batch_size",
        "per_device_train_batch_size * max(steps_per_generation, gradient_accumulation_steps) * devices"
        " / num_generations",
        "TRL counts responses",
    ),
    Rule("algo.update.mini_batches", "max(steps_per_generation / gradient_accumulation_steps, 1)"),
    Rule("algo.update.epochs", "num_iterations"),
    Rule("algo.sampling.max_new_tokens", "max_completion_length"),
    Rule("algo.sampling.temperature", "temperature"),
    Rule("algo.sampling.top_p", "top_p", when=_samples, otherwise=GREEDY),
    Rule(
        "algo.sampling.top_k",
        "top_k",
        by=lambda job: max(job["top_k"] or 0, 0),
        when=_samples,
        otherwise=GREEDY,
    ),
    Rule("algo.sampling.min_p", "min_p", when=_samples, otherwise=GREEDY),
    Rule("algo.sampling.stop", "generation_kwargs", by=_stop),
    Rule("algo.old_logprobs", "", "TRL computes them with the model that is trained", by=lambda job: "recompute"),
    Rule(
        "algo.overlong.mask",
        "mask_truncated_completions | loss_type",
        "TRL's mean over rows counts them too, as 0",
        by=lambda job: job["mask_truncated_completions"],
        when=lambda job: job["mask_truncated_completions"] and MEANS.get(str(job["loss_type"])) != "tokens",
    ),
    Rule("algo.overlong.mask", "mask_truncated_completions"),
    Rule("play.max_turns", "max_tool_calling_iterations + 1", "TRL counts rounds of calls", where="play"),
    Rule("play.tools", "tools", where="play"),
    Rule("tp", "vllm_tensor_parallel_size", where="plan"),
    Rule("play.signature", "environment_factory", where="play"),
    Rule(
        "reward.functions",
        "reward_funcs reward_weights",
        by=lambda job: functions_by_name(listed(job["reward_funcs"]), listed(job["reward_weights"])),
        when=lambda job: bool(job["reward_funcs"]) or not job["reward_model_name_or_path"],
        otherwise="a reward model scores",
    ),
    Rule("reward.path", "reward_model_name_or_path | reward_funcs", by=_reward_model),
    Rule(
        "reward.head",
        "| reward_model_name_or_path",
        by=lambda job: "scalar" if job["reward_model_name_or_path"] and not job["reward_funcs"] else None,
    ),
    Rule(
        "reward.dtype",
        "| reward_model_name_or_path reward_funcs bf16 fp16 dtype torch_dtype",
        "TRL's reward model has the policy's",
        by=lambda job: _dtype(job) if job["reward_model_name_or_path"] and not job["reward_funcs"] else None,
    ),
    Rule(
        "tracking.samples",
        "log_completions num_completions_to_print | report_to",
        by=lambda job: job["num_completions_to_print"] if job["log_completions"] else None,
        when=lambda job: bool(reported(job)),
        otherwise="no tracker is named; rollouts/ of the run's folder has every response",
    ),
    Rule("prompts.chat_template_kwargs", "chat_template_kwargs", by=lambda job: job["chat_template_kwargs"] or None),
    Rule("prompts.system_prompt", "system_prompt"),
    Rule("prompts.max_prompt_length", "max_prompt_length"),
    Rule(
        "prompts.overlong_prompts",
        "max_prompt_length",
        "TRL kept the end of a long prompt",
        by=lambda job: "keep_end" if job["max_prompt_length"] else None,
    ),
)
