"""Rules that translate the options of verl 0.9's `ppo_trainer.yaml`, without its prefix."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from prefect_rlhf.flows.forms.dictionary.job import Job
from prefect_rlhf.flows.forms.dictionary.rule import NULL, Rule, Untranslatable, Unused, only
from prefect_rlhf.flows.forms.dictionary.shared import ESTIMATORS, GREEDY, SCHEDULES, TRACKERS, adapter, listed, passes
from prefect_rlhf.tasks.rl.settings.policy import CLIPS

UPDATES = "algo.update.mini_batches * algo.update.epochs"
STEPS = "verl counts steps, of several optimizer steps each"
MEANS = {"token-mean": "tokens", "seq-mean-token-mean": "rows", "seq-mean-token-sum": 1.0}
LOSSES = {"vanilla": "clip", "gspo": "gspo", "cispo": "cispo"}
ADVANTAGES = {
    "grpo": "grpo",
    "grpo_vectorized": "grpo",
    "rloo": "rloo",
    "rloo_vectorized": "rloo",
    "reinforce_plus_plus": "reinforce_plus_plus",
    "reinforce_plus_plus_baseline": "reinforce_plus_plus_baseline",
    "gdpo": "gdpo",
}
CUTS = {"error": "refuse", "left": "keep_end", "right": "keep_start"}


def _above_zero(option: str) -> Callable[[Job], bool]:
    return lambda job: isinstance(job[option], int | float) and job[option] > 0


def _samples(job: Job) -> bool:
    """Whether a response depends on chance."""
    return bool(job["rollout.do_sample"] and job["rollout.temperature"])


def _is_adam(option: str) -> Callable[[Job], None]:
    def check(job: Job) -> None:
        if str(job[option]).lower() not in ("adam", "adamw"):
            raise Untranslatable("AdamW is the only optimizer here")

    return check


def _advantage(job: Job) -> str:
    name = str(job["algorithm.adv_estimator"])
    if name not in ADVANTAGES:
        raise Untranslatable(f"no advantage here is {name}; known are {', '.join(ADVANTAGES)}")
    plain = name.startswith("grpo") and job["algorithm.norm_adv_by_std_in_grpo"] is False
    return "dr_grpo" if plain else ADVANTAGES[name]


def _mean_over(job: Job) -> Any:
    mode = str(job["actor.loss_agg_mode"])
    if job["actor.policy_loss.loss_mode"] == "gspo":
        return "rows"
    if mode == "seq-mean-token-sum-norm":
        return float(job["actor.loss_scale_factor"] or job["data.max_response_length"])
    if mode not in MEANS:
        raise Untranslatable(f"no mean here is {mode}; known are {', '.join(MEANS)}")
    return MEANS[mode]


def _bound(side: int) -> Callable[[Job], float | None]:
    option = ("actor.clip_ratio_low", "actor.clip_ratio_high")[side]

    def bound(job: Job) -> float | None:
        value: float = job[option] if job[option] is not None else job["actor.clip_ratio"]
        return value if job.differs(option) or value != CLIPS[job.here("algo.loss")][side] else None

    return bound


def _clip(job: Job) -> float:
    low, high = (_bound_of(job, side) for side in ("low", "high"))
    if low != high:
        raise Untranslatable(f"PPO here clips both sides alike, and these are {low} and {high}")
    return low


def _bound_of(job: Job, side: str) -> float:
    stated = job[f"actor.clip_ratio_{side}"]
    return float(job["actor.clip_ratio"] if stated is None else stated)


def _has_kl(job: Job) -> bool:
    return bool(job["actor.use_kl_loss"] or job["algorithm.use_kl_in_reward"])


def _kl(job: Job, part: str) -> Any:
    """The KL term of a flow without a critic: in the loss, in the reward, or none."""
    in_loss, in_reward = job["actor.use_kl_loss"], job["algorithm.use_kl_in_reward"]
    if in_loss and in_reward:
        raise Untranslatable("the KL is in the loss or in the reward here, not in both")
    if not in_loss and not in_reward:
        return 0.0 if part == "coefficient" else None
    if part == "coefficient":
        return job["actor.kl_loss_coef" if in_loss else "algorithm.kl_ctrl.kl_coef"]
    if part == "place":
        return "loss" if in_loss else "reward"
    name = str(job["actor.kl_loss_type" if in_loss else "algorithm.kl_penalty"])
    if name not in ESTIMATORS:
        raise Untranslatable(f"no estimator here is {name}; known are {', '.join(ESTIMATORS)}")
    if in_loss and ESTIMATORS[name] == "k1":
        raise Untranslatable("k1 in a loss has a gradient of zero on average; k2 has the gradient of the KL")
    return ESTIMATORS[name]


def _is_adaptive(job: Job) -> bool:
    return bool(job["algorithm.use_kl_in_reward"]) and job["algorithm.kl_ctrl.type"] == "adaptive"


def _importance(part: str) -> Callable[[Job], Any]:
    def value(job: Job) -> Any:
        level = job["algorithm.rollout_correction.rollout_is"]
        if level is None:
            raise Unused("rollout_is is null")
        lowest, _, highest = str(job["algorithm.rollout_correction.rollout_is_threshold"]).rpartition("_")
        bounds = {"lowest": float(lowest or 0), "highest": float(highest)}
        beyond = "mask" if lowest else "truncate"  # IcePop has two bounds, and no weight beyond them
        return {"level": level, "beyond": beyond, **bounds}[part]

    return value


def _file(option: str) -> Callable[[Job], str | None]:
    def path(job: Job) -> str | None:
        found = [str(each) for each in listed(job[option])]
        if len(found) > 1:
            raise Untranslatable("a path is a file, a folder, or a pattern such as data/train-*.parquet")
        return found[0] if found else None

    return path


def _overlong(job: Job) -> str | None:
    if job["data.filter_overlong_prompts"]:
        return "drop"
    cut = str(job["data.truncation"])
    if cut not in CUTS:
        raise Untranslatable(f"a prompt is not cut in the {cut} here; known are {', '.join(CUTS)}")
    return CUTS[cut]


def _functions(job: Job) -> dict[str, Any] | None:
    for place in ("reward.custom_reward_function", "custom_reward_function"):
        if job[f"{place}.path"]:
            function = f"{job[f'{place}.path']}:{job[f'{place}.name'] or 'compute_score'}"
            return {"score": {"function": function, "signature": "verl"}}
    return None


def _reward_model(job: Job) -> str | None:
    for switch, path in (("reward_model.enable", "reward_model.model.path"),
                         ("reward.reward_model.enable", "reward.reward_model.model_path")):  # fmt: skip
        if job[switch]:
            if _functions(job):
                raise Untranslatable(
                    "a reward here is a model or functions; a function can call a server that runs the model"
                )
            return str(job[path])
    return None


def _reported(job: Job) -> list[str] | None:
    """The trackers that the file names: verl's default would ask for wandb to be installed."""
    if "trainer.logger" not in job.stated:
        return None
    names = [str(name) for name in listed(job["trainer.logger"]) if name not in ("console", "file")]
    if others := [name for name in names if name not in TRACKERS]:
        raise Untranslatable(f"{others[0]}: the trackers here are {', '.join(sorted(set(TRACKERS.values())))}")
    return [TRACKERS[name] for name in names] or None


def _if_tracked(option: str) -> Callable[[Job], Any]:
    return lambda job: job[option] if _reported(job) and option in job.stated else None


def _if_stated(option: str) -> Callable[[Job], Any]:
    return lambda job: job[option] if option in job.stated else None


def _over_sampling(job: Job) -> None:
    if job["data.gen_batch_size"] is None:
        raise Untranslatable("state data.gen_batch_size: algo.over_sampling = gen_batch_size / train_batch_size")


def optimizer(role: str, path: str) -> tuple[Rule, ...]:
    """Return the rules for a role's AdamW and its learning rate."""
    options, warmup = f"{role}.optim", f"{path}.warmup_steps"

    def clip(job: Job) -> Any:
        older = job[f"{role}.grad_clip"] if job.differs(f"{role}.grad_clip") else None
        return job[f"{options}.clip_grad"] if older is None or job.differs(f"{options}.clip_grad") else older

    return (
        Rule(f"{path}.lr", f"{options}.lr"),
        Rule(
            f"{path}.schedule",
            f"{options}.lr_decay_style",
            words=SCHEDULES,
            when=lambda job: job.differs(f"{options}.lr_decay_style"),
        ),
        Rule(f"{path}.schedule", f"{options}.lr_scheduler_type", words=SCHEDULES),
        Rule(
            f"{path}.decay_steps",
            f"{options}.lr_decay_steps * {UPDATES}",
            STEPS,
            when=_above_zero(f"{options}.lr_decay_steps"),
        ),
        Rule(
            f"{path}.min_lr_ratio",
            f"{options}.min_lr / {options}.lr",
            "verl states the rate",
            whole="no",
            when=_above_zero(f"{options}.min_lr"),
        ),
        Rule(
            f"{path}.min_lr_ratio",
            f"{options}.min_lr_ratio",
            when=lambda job: job.here(f"{path}.schedule") != "constant",
            otherwise="a constant rate does not fall",
        ),
        Rule(warmup, f"{options}.lr_warmup_steps * {UPDATES}", STEPS, when=_above_zero(f"{options}.lr_warmup_steps")),
        Rule(
            warmup,
            f"{options}.lr_warmup_steps_ratio * steps * {UPDATES}",
            whole="about",
            when=_above_zero(f"{options}.lr_warmup_steps_ratio"),
        ),
        Rule(f"{path}.max_grad_norm", f"{options}.clip_grad {role}.grad_clip", by=clip),
        Rule(f"{path}.weight_decay", f"{options}.weight_decay"),
        Rule(f"{path}.betas", f"{options}.betas"),
        Rule(f"{path}.eps", f"{options}.eps"),
        *(
            Rule("", f"{options}.{name}", by=_is_adam(f"{options}.{name}"), where="check")
            for name in ("optimizer", "name")
        ),
    )


SHARED: tuple[Rule, ...] = (
    only("data.shuffle", True, why="each pass has its own order; rows are not read in the order of the file"),
    Rule("actor.path", "model.path"),
    Rule("prompts.path", "data.train_files", by=_file("data.train_files")),
    Rule("held_out.path", "data.val_files", by=_file("data.val_files")),
    *(
        Rule(f"{rows}.split_column", "", "verl's splits are files", by=lambda job: NULL)
        for rows in ("prompts", "held_out")
    ),
    *(
        Rule(f"{rows}.{ours}", theirs, by=by)
        for ours, theirs, by in (
            ("prompt_column", "data.prompt_key", None),
            ("max_prompt_length", "data.max_prompt_length", None),
            ("overlong_prompts", "data.filter_overlong_prompts data.truncation", _overlong),
            (
                "chat_template_kwargs",
                "data.apply_chat_template_kwargs",
                lambda job: job["data.apply_chat_template_kwargs"] or None,
            ),
        )
        for rows in ("prompts", "held_out")
    ),
    Rule(
        "reward.functions",
        "custom_reward_function.path custom_reward_function.name reward.custom_reward_function.path"
        " reward.custom_reward_function.name",
        by=_functions,
    ),
    Rule(
        "reward.path",
        "reward_model.enable reward_model.model.path reward.reward_model.enable reward.reward_model.model_path",
        by=_reward_model,
    ),
    Rule("reward.head", "| reward_model.enable", by=lambda job: "scalar" if _reward_model(job) else None),
    Rule("algo.batch_size", "data.train_batch_size"),
    Rule("algo.sampling.max_new_tokens", "data.max_response_length"),
    Rule(
        "algo.sampling.temperature",
        "rollout.temperature rollout.do_sample",
        by=lambda job: job["rollout.temperature"] if job["rollout.do_sample"] else 0.0,
    ),
    Rule("algo.sampling.top_p", "rollout.top_p", when=_samples, otherwise=GREEDY),
    Rule(
        "algo.sampling.top_k",
        "rollout.top_k",
        "0 is what verl writes as -1",
        by=lambda job: max(job["rollout.top_k"] or 0, 0),
        when=_samples,
        otherwise=GREEDY,
    ),
    Rule(
        "algo.sampling.stop_at_eos",
        "rollout.ignore_eos",
        "it is the opposite",
        by=lambda job: not job["rollout.ignore_eos"],
    ),
    Rule(
        "algo.old_logprobs",
        "algorithm.rollout_correction.bypass_mode",
        "verl computes them with the model that is trained",
        by=lambda job: "rollout" if job["algorithm.rollout_correction.bypass_mode"] else "recompute",
    ),
    *(
        Rule(f"algo.importance.{part}", f"{options} | algorithm.rollout_correction.rollout_is", by=_importance(part))
        for part, options in (
            ("level", "algorithm.rollout_correction.rollout_is"),
            ("beyond", ""),
            ("highest", "algorithm.rollout_correction.rollout_is_threshold"),
            ("lowest", "algorithm.rollout_correction.rollout_is_threshold"),
        )
    ),
    Rule("play.tools", "rollout.multi_turn.tool_config_path", where="play"),
    Rule("play.tools", "rollout.multi_turn.function_tool_path", where="play"),
    Rule("play.tool_format", "rollout.multi_turn.format", where="play"),
    Rule("play.max_turns", "rollout.multi_turn.max_assistant_turns", where="play"),
    Rule(
        "play.max_answer_tokens",
        "rollout.multi_turn.max_tool_response_length / 4",
        "about, since verl counts characters",
        whole="about",
        where="play",
    ),
    Rule("play.overlong_answers", "rollout.multi_turn.tool_response_truncate_side", where="play"),
    Rule("play.workers", "rollout.agent.num_workers / replicas", where="play"),
    Rule(
        "micro_batches",
        "actor.ppo_mini_batch_size * rollout.n / (dp * actor.ppo_micro_batch_size_per_gpu)",
        where="plan",
    ),
    Rule("recompute", "model.enable_gradient_checkpointing", where="plan"),
    Rule("engine", "rollout.name", where="plan"),
    Rule("tp", "rollout.tensor_model_parallel_size", where="plan"),
    Rule(
        "staleness",
        "trainer.v1.trainer_mode",
        words={"sync": 0, "colocate_async": 1, "separate_async": 1},
    ),
    Rule(
        "epochs",
        "trainer.total_epochs | trainer.total_training_steps",
        by=lambda job: passes(job["trainer.total_epochs"]),
        when=lambda job: job["trainer.total_training_steps"] is None,
        otherwise="trainer.total_training_steps is stated",
    ),
    Rule("steps", "trainer.total_training_steps"),
    Rule("algo.evaluate_every", "trainer.test_freq", when=_above_zero("trainer.test_freq"), otherwise="it is off"),
    Rule("checkpoint_every", "trainer.save_freq", when=_above_zero("trainer.save_freq"), otherwise="it is off"),
    Rule("keep_checkpoints", "trainer.max_actor_ckpt_to_keep"),
    Rule("seed", "data.seed"),
    Rule("output_dir", "trainer.default_local_dir", by=_if_stated("trainer.default_local_dir")),
    Rule("tracking.report_to", "trainer.logger", by=_reported),
    Rule("tracking.project", "trainer.project_name", by=_if_tracked("trainer.project_name")),
    Rule("tracking.samples", "trainer.log_val_generations", by=_if_tracked("trainer.log_val_generations")),
)


def _adapter(role: str, model: str) -> tuple[Rule, ...]:
    names = {"rank": "lora_rank", "alpha": "lora_alpha", "matrices": "target_modules", "path": "lora_adapter_path"}
    options = {name: f"{model}.{option}" for name, option in names.items()}
    return adapter(role, options, _above_zero(options["rank"]), f"{options['rank']} is 0")


OF_ADAPTER: tuple[Rule, ...] = _adapter("actor", "model")
UPDATE: tuple[Rule, ...] = (
    Rule("algo.update.mini_batches", "data.train_batch_size / actor.ppo_mini_batch_size"),
    Rule("algo.update.epochs", "actor.ppo_epochs"),
)
GROUPS: tuple[Rule, ...] = (
    Rule("algo.samples_per_prompt", "rollout.n"),
    Rule("ref.path", "| model.path", by=lambda job: job["model.path"], when=_has_kl, otherwise="no KL is computed"),
    Rule(
        "algo.advantage", "algorithm.adv_estimator algorithm.norm_adv_by_std_in_grpo", by=_advantage, words=ADVANTAGES
    ),
    Rule("algo.loss", "actor.policy_loss.loss_mode", words=LOSSES),
    Rule("algo.mean_over", "actor.loss_agg_mode actor.loss_scale_factor", by=_mean_over, words=MEANS),
    Rule("algo.clip_low", "actor.clip_ratio_low", by=_bound(0)),
    Rule("algo.clip_high", "actor.clip_ratio_high", by=_bound(1)),
    Rule(
        "algo.kl.coefficient",
        "actor.use_kl_loss actor.kl_loss_coef algorithm.use_kl_in_reward algorithm.kl_ctrl.kl_coef",
        by=lambda job: _kl(job, "coefficient"),
    ),
    Rule(
        "algo.kl.estimator",
        "actor.kl_loss_type algorithm.kl_penalty | actor.use_kl_loss",
        by=lambda job: _kl(job, "estimator"),
        words=ESTIMATORS,
    ),
    Rule("algo.kl.place", "actor.use_kl_loss algorithm.use_kl_in_reward", by=lambda job: _kl(job, "place")),
    Rule(
        "algo.over_sampling",
        "data.gen_batch_size / data.train_batch_size",
        whole="no",
        when=lambda job: bool(job["algorithm.filter_groups.enable"]),
        otherwise="algorithm.filter_groups.enable is false",
    ),
    Rule(
        "algo.over_sampling",
        "algorithm.filter_groups.enable | data.gen_batch_size",
        by=_over_sampling,
        when=lambda job: bool(job["algorithm.filter_groups.enable"]),
        otherwise="it is off",
    ),
    only("algorithm.kl_ctrl.type", "fixed", why="without a critic the coefficient is fixed here"),
)
PENALTY: tuple[Rule, ...] = (
    Rule("ref.path", "| model.path", by=lambda job: job["model.path"]),
    Rule("algo.kl.kind", "algorithm.kl_ctrl.type", by=lambda job: "adaptive" if _is_adaptive(job) else "fixed"),
    Rule(
        "algo.kl.coefficient",
        "algorithm.use_kl_in_reward algorithm.kl_ctrl.kl_coef",
        by=lambda job: job["algorithm.kl_ctrl.kl_coef"] if job["algorithm.use_kl_in_reward"] else 0.0,
    ),
    Rule("algo.kl.horizon", "algorithm.kl_ctrl.horizon", when=_is_adaptive, otherwise="the coefficient is fixed"),
    Rule(
        "algo.kl.target",
        "algorithm.kl_ctrl.target_kl * response_tokens",
        "verl has a mean over tokens, we have a sum",
        whole="no",
        when=_is_adaptive,
        otherwise="the coefficient is fixed",
    ),
    Rule("algo.kl.estimator", "algorithm.kl_penalty", words=ESTIMATORS),
    only("actor.use_kl_loss", False, why="the KL is subtracted from the reward here; algorithm.use_kl_in_reward"),
    only("actor.policy_loss.loss_mode", "vanilla", why="without groups the loss is the clipped one"),
    only("actor.loss_agg_mode", "token-mean", why="without groups the loss is a mean over tokens"),
    only("rollout.n", 1, why="without groups a prompt has a single response here"),
)
REMAX: tuple[Rule, ...] = (
    only("actor.ppo_epochs", 1, why="ReMax here passes over a step's rows once"),
    only(
        "actor.ppo_mini_batch_size",
        lambda job: job["data.train_batch_size"],
        why="ReMax here has one optimizer step, so actor.ppo_mini_batch_size is data.train_batch_size",
    ),
)
PPO: tuple[Rule, ...] = (
    Rule("critic.path", "critic.model.path"),
    Rule("critic.head", "", "a value of each token", by=lambda job: "scalar"),
    Rule("critic.new_head", "", by=lambda job: True),
    *_adapter("critic", "critic.model"),
    Rule("algo.clip", "actor.clip_ratio_low actor.clip_ratio_high", by=_clip),
    Rule("algo.value_clip", "critic.cliprange_value"),
    Rule("algo.gamma", "algorithm.gamma"),
    Rule("algo.lam", "algorithm.lam"),
    Rule(
        "algo.critic_optimizer.head_lr",
        "| critic.optim.lr",
        "verl's head has the same rate",
        by=lambda job: job["critic.optim.lr"],
    ),
    only("critic.ppo_epochs", lambda job: job["actor.ppo_epochs"], why="actor and critic have the same passes here"),
    only(
        "critic.ppo_mini_batch_size",
        lambda job: job["actor.ppo_mini_batch_size"],
        why="actor and critic have the same mini-batches here",
    ),
    only("critic.loss_agg_mode", "token-mean", why="the loss of values is a mean over tokens"),
)
