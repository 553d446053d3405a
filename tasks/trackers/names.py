"""The names of metrics in other trainers, so that their curves and ours appear in the same plots."""

from collections import Counter
from collections.abc import Mapping
from typing import Literal

Names = Literal["verl", "trl", "own"]
"""The trainer with the names that metrics get in a tracker; a metric without such a name keeps its own."""

TRAINERS = ("verl", "trl")
PEERS: Mapping[str, tuple[str | None, str | None]] = {
    "actor_train.loss": ("actor/pg_loss", "loss"),
    "actor_train.grad_norm": ("actor/grad_norm", "grad_norm"),
    "actor_train.learning_rate": ("actor/lr", "learning_rate"),
    "actor_train.entropy": ("actor/entropy", "entropy"),
    "actor_train.approx_kl": ("actor/ppo_kl", "policy/approxkl_avg"),
    "actor_train.clip_fraction": ("actor/pg_clipfrac", "policy/clipfrac_avg"),
    "actor_train.ratio": (None, "val/ratio"),
    "actor_train.kl_per_token": ("actor/kl_loss", "kl"),
    "critic_train.loss": ("critic/vf_loss", "loss/value_avg"),
    "critic_train.grad_norm": ("critic/grad_norm", None),
    "critic_train.learning_rate": ("critic/lr", None),
    "critic_train.clip_fraction": ("critic/vf_clipfrac", "val/clipfrac_avg"),
    "gae.advantage_mean": ("critic/advantages/mean", None),
    "gae.return": ("critic/returns/mean", None),
    "gae.value": ("critic/values/mean", None),
    "gae.explained_variance": ("critic/vf_explained_var", None),
    "kl_penalised_rewards.score": ("critic/score/mean", "objective/scores"),
    "kl_penalised_rewards.reward": ("critic/rewards/mean", "objective/rlhf_reward"),
    "kl_penalised_rewards.kl": (None, "objective/kl"),
    "kl_penalised_rewards.kl_per_token": ("actor/reward_kl_penalty", None),
    "kl_penalised_rewards.kl_coefficient": ("actor/reward_kl_penalty_coeff", None),
    "kl_penalised_rewards.response_tokens": ("response_length/mean", "completions/mean_length"),
    "grpo_advantages.score": ("critic/score/mean", "reward"),
    "grpo_advantages.group_deviation": (None, "reward_std"),
    "grpo_advantages.zero_deviation": (None, "frac_reward_zero_std"),
    "grpo_advantages.response_tokens": ("response_length/mean", "completions/mean_length"),
    "grpo_advantages.truncated": ("response_length/clip_ratio", "completions/clipped_ratio"),
    "actor_train.accuracy": (None, "rewards/accuracies"),
    "actor_train.margin": (None, "rewards/margins"),
    "actor_train.chosen_reward": (None, "rewards/chosen"),
    "actor_train.rejected_reward": (None, "rewards/rejected"),
    "record_evaluation.score": (None, "eval_reward"),
    "record_evaluation.response_tokens": (None, "eval_completions/mean_length"),
    "preference_accuracy.accuracy": (None, "eval_rewards/accuracies"),
    "preference_accuracy.margin": (None, "eval_rewards/margins"),
    "token_loss.loss": (None, "eval_loss"),
    "seconds": ("timing_s/step", "step_time"),
}
"""Verl's and TRL's name of each of our metrics."""

NAMED_REWARD = "grpo_advantages.score_"
"""The prefix for a named reward's metric; TRL has `rewards/NAME/mean`."""


def tracked_values(line: Mapping[str, float], names: Names) -> dict[str, float]:
    """Return a line of metrics without its `step`, each under the tracker's name for it; no value is lost.

    If several metrics would have the same name, each keeps its own name.
    """
    named = {name: tracked_name(name, names) for name in line if name != "step"}
    times = Counter(named.values())
    return {shown if times[shown] == 1 else own_name(name): line[name] for name, shown in named.items()}


def tracked_name(name: str, names: Names) -> str:
    """Return the name of a metric in another trainer, or else its own name.

    >>> tracked_name("gae.value", "verl"), tracked_name("gae.value", "trl"), tracked_name("gae.value", "own")
    ('critic/values/mean', 'gae/value', 'gae/value')
    """
    if names == "trl" and name.startswith(NAMED_REWARD) and name.removeprefix(NAMED_REWARD) not in ("low", "high"):
        return f"rewards/{name.removeprefix(NAMED_REWARD)}/mean"
    peers = dict(zip(TRAINERS, PEERS.get(name, (None, None)), strict=True))
    return peers.get(names) or own_name(name)


def own_name(name: str) -> str:
    """Return a metric's own name with a slash after its call: trackers group metrics by the word before the slash.

    >>> own_name("actor_train.ppo_clip.loss")
    'actor_train/ppo_clip.loss'
    """
    return name.replace(".", "/", 1)
