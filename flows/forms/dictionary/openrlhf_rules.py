"""Rules that translate the options of OpenRLHF 0.11's programs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from prefect_rlhf.flows.forms.dictionary.job import Job
from prefect_rlhf.flows.forms.dictionary.rule import NULL, Null, Rule, Untranslatable
from prefect_rlhf.flows.forms.dictionary.shared import GREEDY, SCHEDULES, adapter, files_of, listed, passes
from prefect_rlhf.tasks.rl.settings.policy import CLIPS

UPDATES = "algo.update.mini_batches * algo.update.epochs"
ADVANTAGES = {
    "group_norm": "grpo",
    "dr_grpo": "dr_grpo",
    "rloo": "rloo",
    "reinforce": "reinforce_plus_plus",
    "reinforce_baseline": "reinforce_plus_plus_baseline",
}
LOSSES = {"ppo": "clip", "gspo": "gspo"}


def _above_zero(option: str) -> Callable[[Job], bool]:
    return lambda job: isinstance(job[option], int | float) and job[option] > 0


def _clips(job: Job) -> list[float]:
    both = [float(each) for each in listed(job["actor.eps_clip_low_high"])]
    return both if len(both) == 2 else [job["actor.eps_clip"]] * 2  # noqa: PLR2004


def _bound(side: int) -> Callable[[Job], float | None]:
    def bound(job: Job) -> float | None:
        value = _clips(job)[side]
        is_stated = job.differs("actor.eps_clip") or job.differs("actor.eps_clip_low_high")
        return value if is_stated or value != CLIPS[job.here("algo.loss")][side] else None

    return bound


def _clip(job: Job) -> float:
    low, high = _clips(job)
    if low != high:
        raise Untranslatable(f"PPO here clips both sides alike, and these are {low:g} and {high:g}")
    return low


def _has_kl(job: Job) -> bool:
    return bool(job["algo.kl.init_coef"])


def _in_loss(job: Job) -> bool:
    return bool(job["algo.kl.use_loss"])


def _estimator(job: Job) -> str:
    name = str(job["algo.kl.estimator"])
    if _in_loss(job) and name == "k1":
        raise Untranslatable("k1 in a loss has a gradient of zero on average; k2 has the gradient of the KL")
    return name


def _no_kl_in_loss(job: Job) -> None:
    if _in_loss(job):
        raise Untranslatable("PPO here subtracts the KL from the reward")


def _one_response(job: Job) -> None:
    if job["rollout.n_samples_per_prompt"] != 1:
        raise Untranslatable("PPO here has a single response to a prompt")


def _advantage(job: Job) -> str:
    name = str(job["algo.advantage.estimator"])
    if job["algo.advantage.no_std_norm"] and name.startswith("reinforce"):
        raise Untranslatable(f"{ADVANTAGES[name]} here divides by the deviation")
    if name not in ADVANTAGES:
        raise Untranslatable(f"no advantage here is {name}; known are {', '.join(ADVANTAGES)}")
    return ADVANTAGES[name]


def _is_corrected(job: Job) -> bool:
    return bool(job["algo.advantage.is_correction_enable"])


def _importance(part: str) -> Callable[[Job], Any]:
    def value(job: Job) -> Any:
        kind = str(job["algo.advantage.is_correction_type"])
        if kind not in ("tis", "icepop"):
            raise Untranslatable(f"no correction here is {kind}; use tis or icepop")
        lowest, highest = (float(each) for each in listed(job["algo.advantage.is_correction_threshold"]))
        beyond = "truncate" if kind == "tis" else "mask"
        return {"level": "token", "beyond": beyond, "lowest": lowest, "highest": highest}[part]

    return value


def _critic(job: Job) -> str | None:
    """The critic is the reward model, or else the actor, unless it is named."""
    named = job["critic.model_name_or_path"] or job["reward.model_name_or_path"] or job["actor.model_name_or_path"]
    return str(named).partition(",")[0] if named else None


def _reward(job: Job) -> str | None:
    named = [each for each in str(job["reward.model_name_or_path"] or "").split(",") if each]
    if len(named) > 1:
        raise Untranslatable("a reward here is one model, or several functions")
    return named[0] if named else None


def _pair_loss(job: Job) -> str:
    if job["model.ipo_enable"]:
        raise Untranslatable("ipo here takes means over tokens, OpenRLHF's takes sums")
    return "cdpo" if job["model.label_smoothing"] else "dpo"


def _most_tokens(job: Job) -> int | None:
    """The longest response. Without it OpenRLHF bounds prompt and response together."""
    stated: int | None = job["rollout.max_new_tokens"]
    if stated is None:
        raise Untranslatable(
            f"state algo.sampling.max_new_tokens: OpenRLHF has data.max_len, {job['data.max_len']}, less the prompt"
        )
    return stated


def _wandb(job: Job) -> list[str] | None:
    named = [
        name
        for name, option in (("wandb", "logger.wandb.key"), ("tensorboard", "logger.tensorboard_dir"))
        if job[option]
    ]
    return named or None


def _files(data: str, split: str) -> Callable[[Job], str | None]:
    def path(job: Job) -> str | None:
        if "," in str(job[data]):
            raise Untranslatable("a path is a file, a folder, or a pattern; join several files beforehand")
        return files_of(job[data], job[split])

    return path


def _score_clip(job: Job) -> float:
    low, high = (float(each) for each in listed(job["reward.clip_range"]))
    if low != -high:
        raise Untranslatable(f"scores are clipped to the same size on both sides here, not to {low:g} and {high:g}")
    return high


def optimizer(prefix: str, path: str) -> tuple[Rule, ...]:
    """Return the rules for AdamW and its learning rate; `prefix` is a model's prefix, or empty."""
    return (
        Rule(f"{path}.lr", f"{prefix}adam.lr"),
        Rule(f"{path}.betas", f"{prefix}adam.betas", by=lambda job: listed(job[f"{prefix}adam.betas"])),
        Rule(f"{path}.eps", f"{prefix}adam.eps"),
        Rule(f"{path}.weight_decay", f"{prefix}adam.weight_decay"),
        Rule(f"{path}.max_grad_norm", f"{prefix}max_norm", by=lambda job: job[f"{prefix}max_norm"] or 1e9),
        Rule(f"{path}.schedule", f"{prefix}lr_scheduler", words=SCHEDULES),
        Rule(
            f"{path}.min_lr_ratio",
            f"{prefix}min_lr_ratio",
            when=lambda job: job[f"{prefix}lr_scheduler"] == "cosine_with_min_lr",
            otherwise="the schedule falls to 0, or not at all",
        ),
        Rule(
            f"{path}.warmup_steps",
            f"{prefix}lr_warmup_ratio * steps * {UPDATES}",
            whole="about",
            when=_above_zero(f"{prefix}lr_warmup_ratio"),
            otherwise="it is 0",
        ),
    )


def adapter_of(role: str) -> tuple[Rule, ...]:
    """Return the rules for a role's adapter; OpenRLHF gives the same adapter to all trained models."""
    names = {"rank": "rank", "alpha": "alpha", "matrices": "target_modules", "dropout": "dropout"}
    options = {name: f"ds.lora.{option}" for name, option in names.items()}
    is_on, off = _above_zero(options["rank"]), f"{options['rank']} is 0"
    bits = Rule(f"{role}.base_dtype", "ds.load_in_4bit", by=_four_bits, when=is_on, otherwise=off)
    return (*adapter(role, options, is_on, off), bits)


def _four_bits(job: Job) -> str | None:
    """The format of a frozen base: OpenRLHF's is NF4 with double quantisation too."""
    return "nf4" if job["ds.load_in_4bit"] else None


def _is_set(option: str) -> Callable[[Job], bool]:
    return lambda job: bool(job[option])


def rows(parameter: str, data: str, split: str, *columns: tuple[str, str]) -> tuple[Rule, ...]:
    """Return the rules for a dataset and its held-out rows; `columns` pairs our columns with theirs."""

    def split_column(option: str) -> Callable[[Job], Null | None]:
        return lambda job: NULL if job[option] else None

    both = ((parameter, data), ("held_out", "eval.dataset"))
    return (
        Rule(f"{parameter}.path", f"{data} {split}", by=_files(data, split)),
        Rule("held_out.path", "eval.dataset eval.split", by=_files("eval.dataset", "eval.split")),
        *(Rule(f"{name}.split_column", f"| {option}", by=split_column(option)) for name, option in both),
        *(
            Rule(
                f"{name}.{ours}",
                theirs,
                when=_is_set(option),
                otherwise="no dataset is named",
            )
            for ours, theirs in (*columns, ("chat_template", "data.apply_chat_template"))
            for name, option in both
        ),
        *(
            Rule(
                f"{name}.end_of_text",
                "",
                "OpenRLHF ends every answer",
                by=lambda job: True,
                when=_is_set(option),
                otherwise="no dataset is named",
            )
            for name, option in both
            if parameter == "pairs"
        ),
    )


RUN: tuple[Rule, ...] = (
    Rule("algo.evaluate_every", "eval.steps", when=_above_zero("eval.steps"), otherwise="it is off"),
    Rule("checkpoint_every", "ckpt.save_steps", when=_above_zero("ckpt.save_steps"), otherwise="it is off"),
    Rule("keep_checkpoints", "ckpt.max_num", when=_above_zero("ckpt.save_steps"), otherwise="no checkpoint is written"),
    Rule("seed", "train.seed"),
    Rule("output_dir", "ckpt.output_dir"),
    Rule("tracking.report_to", "logger.wandb.key logger.tensorboard_dir", by=_wandb),
    Rule(
        "tracking.project",
        "logger.wandb.project",
        when=lambda job: bool(_wandb(job)) and "logger.wandb.project" in job.stated,
        otherwise="no tracker is named",
    ),
)
ONLINE: tuple[Rule, ...] = (
    Rule("actor.path", "actor.model_name_or_path"),
    Rule("reward.path", "reward.model_name_or_path", by=_reward),
    Rule(
        "reward.head",
        "| reward.model_name_or_path",
        by=lambda job: "scalar" if job["reward.model_name_or_path"] else None,
    ),
    *rows("prompts", "data.prompt_dataset", "data.prompt_split", ("prompt_column", "data.input_key")),
    Rule("prompts.max_prompt_length", "prompt_max_len"),
    Rule("algo.batch_size", "rollout.batch_size"),
    Rule("algo.update.mini_batches", "rollout.batch_size * rollout.n_samples_per_prompt / train.batch_size"),
    Rule("algo.update.epochs", "train.max_epochs"),
    Rule("algo.sampling.max_new_tokens", "rollout.max_new_tokens | data.max_len", by=_most_tokens),
    Rule("algo.sampling.temperature", "rollout.temperature"),
    Rule(
        "algo.sampling.top_p",
        "rollout.top_p",
        when=lambda job: bool(job["rollout.temperature"]),
        otherwise=GREEDY,
    ),
    Rule("algo.old_logprobs", "", "OpenRLHF computes them with the model that is trained", by=lambda job: "recompute"),
    *(
        Rule(
            f"algo.importance.{part}",
            options,
            by=_importance(part),
            when=_is_corrected,
            otherwise="no correction is enabled",
        )
        for part, options in (
            ("level", "algo.advantage.is_correction_enable algo.advantage.is_correction_type"),
            ("beyond", "algo.advantage.is_correction_type"),
            ("highest", "algo.advantage.is_correction_threshold"),
            ("lowest", "algo.advantage.is_correction_threshold"),
        )
    ),
    Rule(
        "micro_batches",
        "train.batch_size / (dp * train.micro_batch_size)",
        where="plan",
    ),
    Rule(
        "micro_batches",
        "rollout.batch_size * rollout.n_samples_per_prompt / (dp * rollout.micro_batch_size)",
        where="plan",
    ),
    Rule("recompute", "actor.gradient_checkpointing_enable", where="plan"),
    Rule("engine", "vllm.num_engines", where="plan"),
    Rule("tp", "vllm.tensor_parallel_size", where="plan"),
    Rule("staleness", "train.async_enable", words={True: 1, False: 0}),
    Rule("epochs", "train.num_episodes", by=lambda job: passes(job["train.num_episodes"])),
    *RUN,
)
GROUPS: tuple[Rule, ...] = (
    Rule(
        "ref.path",
        "| actor.model_name_or_path",
        by=lambda job: job["actor.model_name_or_path"],
        when=_has_kl,
        otherwise="no KL is computed",
    ),
    Rule("algo.samples_per_prompt", "rollout.n_samples_per_prompt"),
    Rule("algo.advantage", "algo.advantage.estimator algo.advantage.no_std_norm", by=_advantage, words=ADVANTAGES),
    Rule("algo.loss", "actor.policy_loss_type", words=LOSSES),
    Rule(
        "algo.mean_over",
        "| actor.policy_loss_type",
        "OpenRLHF's mean is over tokens",
        by=lambda job: "rows" if job["actor.policy_loss_type"] == "gspo" else "tokens",
    ),
    Rule("algo.clip_low", "actor.eps_clip actor.eps_clip_low_high", by=_bound(0)),
    Rule("algo.clip_high", "actor.eps_clip actor.eps_clip_low_high", by=_bound(1)),
    Rule("algo.kl.coefficient", "algo.kl.init_coef"),
    Rule("algo.kl.estimator", "algo.kl.estimator", by=_estimator, when=_has_kl, otherwise="no KL is computed"),
    Rule(
        "algo.kl.place",
        "algo.kl.use_loss",
        by=lambda job: "loss",
        when=lambda job: _has_kl(job) and _in_loss(job),
        otherwise="no KL is computed",
    ),
    Rule(
        "algo.kl.place",
        "algo.kl.use_loss",
        "here before scores are compared, in OpenRLHF after it",
        by=lambda job: "reward",
        when=_has_kl,
        otherwise="no KL is computed",
    ),
    Rule("algo.over_sampling", "algo.dynamic_filtering_enable", words={True: 2.0, False: 1.0}),
    Rule(
        "algo.overlong.buffer",
        "reward.overlong_buffer_len",
        by=lambda job: job["reward.overlong_buffer_len"] and int(job["reward.overlong_buffer_len"]),
    ),
    Rule(
        "algo.overlong.penalty",
        "reward.overlong_penalty_factor",
        when=_is_set("reward.overlong_buffer_len"),
        otherwise="no buffer is set",
    ),
)
PPO: tuple[Rule, ...] = (
    Rule("ref.path", "| actor.model_name_or_path", by=lambda job: job["actor.model_name_or_path"]),
    Rule("critic.path", "critic.model_name_or_path | reward.model_name_or_path actor.model_name_or_path", by=_critic),
    Rule("critic.head", "", "a value of each token", by=lambda job: "scalar"),
    Rule("critic.new_head", "", by=lambda job: True),
    Rule("algo.clip", "actor.eps_clip actor.eps_clip_low_high", by=_clip),
    Rule("algo.value_clip", "critic.value_clip"),
    Rule("algo.gamma", "algo.advantage.gamma"),
    Rule("algo.lam", "algo.advantage.lambd"),
    Rule("algo.whiten_advantages", "algo.advantage.no_std_norm", words={False: True}),
    Rule("algo.kl.kind", "algo.kl.target", by=lambda job: "adaptive" if job["algo.kl.target"] else "fixed"),
    Rule("algo.kl.coefficient", "algo.kl.init_coef"),
    Rule(
        "algo.kl.horizon",
        "algo.kl.horizon",
        when=_is_set("algo.kl.target"),
        otherwise="the coefficient is fixed",
    ),
    Rule(
        "algo.kl.target",
        "algo.kl.target * response_tokens",
        "OpenRLHF has a mean over tokens, we have a sum",
        whole="no",
    ),
    Rule("algo.kl.estimator", "algo.kl.estimator", by=_estimator),
    Rule("algo.normalise_scores", "reward.normalize_enable"),
    Rule("algo.score_clip", "reward.clip_range", by=_score_clip),
    Rule(
        "algo.critic_optimizer.head_lr",
        "| critic.adam.lr",
        "OpenRLHF's head has the same rate",
        by=lambda job: job["critic.adam.lr"],
    ),
    Rule("", "algo.kl.use_loss", by=_no_kl_in_loss, where="check"),
    Rule("", "rollout.n_samples_per_prompt", by=_one_response, where="check"),
)
OFFLINE: tuple[Rule, ...] = (
    Rule("algo.batch_size", "train.batch_size"),
    Rule("epochs", "train.max_epochs", by=lambda job: passes(job["train.max_epochs"])),
    Rule("micro_batches", "train.batch_size / (dp * train.micro_batch_size)", where="plan"),
    Rule("recompute", "model.gradient_checkpointing_enable", where="plan"),
    *RUN,
)
PAIRS: tuple[Rule, ...] = (
    Rule("actor.path", "model.model_name_or_path"),
    Rule(
        "ref.path",
        "ref.model_name_or_path | model.model_name_or_path",
        by=lambda job: job["ref.model_name_or_path"] or job["model.model_name_or_path"],
    ),
    *rows(
        "pairs",
        "data.dataset",
        "data.dataset_split",
        ("prompt_column", "data.prompt_key"),
        ("chosen_column", "data.chosen_key"),
        ("rejected_column", "data.rejected_key"),
    ),
    Rule("algo.loss", "model.ipo_enable model.label_smoothing", by=_pair_loss),
    Rule("algo.beta", "model.beta", by=lambda job: job["model.beta"] if job.differs("model.beta") else None),
    Rule(
        "algo.label_smoothing",
        "model.label_smoothing",
        when=_is_set("model.label_smoothing"),
        otherwise="it is 0",
    ),
)
CHATS: tuple[Rule, ...] = (
    Rule("actor.path", "model.model_name_or_path"),
    *rows("chats", "data.dataset", "data.dataset_split"),
    Rule(
        "chats.prompt_column",
        "data.input_key",
        when=_is_set("data.output_key"),
        otherwise="the text has its answer",
    ),
    Rule("chats.completion_column", "data.output_key"),
    Rule(
        "chats.text_column",
        "data.input_key",
        when=lambda job: not job["data.output_key"] and not job["data.apply_chat_template"],
        otherwise="it is a prompt",
    ),
    Rule(
        "chats.messages_column",
        "data.input_key",
        when=lambda job: not job["data.output_key"] and bool(job["data.apply_chat_template"]),
        otherwise="it is a text",
    ),
)
REWARD: tuple[Rule, ...] = (
    Rule("reward.path", "model.model_name_or_path"),
    Rule("reward.head", "", "a score of each row", by=lambda job: "scalar"),
    Rule("reward.new_head", "", by=lambda job: True),
    *rows(
        "pairs",
        "data.dataset",
        "data.dataset_split",
        ("prompt_column", "data.prompt_key"),
        ("chosen_column", "data.chosen_key"),
        ("rejected_column", "data.rejected_key"),
    ),
    Rule("algo.optimizer.head_lr", "| adam.lr", "OpenRLHF's head has the same rate", by=lambda job: job["adam.lr"]),
)
