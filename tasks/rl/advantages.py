"""Advantages: how much better each response token was than expected.

Shapes: B rows, T response tokens, G rows of one prompt.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from prefect_rlhf.engines.compute import Computed
from prefect_rlhf.engines.rows import Batch
from prefect_rlhf.tasks.operations import computation
from prefect_rlhf.tasks.rl import group_advantages
from prefect_rlhf.tasks.rl.groups import group_metrics, group_scores, groups_of
from prefect_rlhf.tasks.rl.hyperparameters import GRPO, PPO, ReMax
from prefect_rlhf.tasks.rl.masked import masked_mean, masked_variance, mean_of, response_mask, row_weights, whiten
from prefect_rlhf.tasks.rl.overlong import overlong_penalty, response_lengths, truncated_rows
from prefect_rlhf.tasks.rl.score_shaping import kl_penalties, named_rewards, weighted_rewards
from prefect_rlhf.tasks.settings import Settings

if TYPE_CHECKING:
    from torch import Tensor


@computation("advantages", "returns", "row_weights")
def gae(rewards: Batch, values: Batch, settings: PPO) -> Computed:
    """Estimate generalised advantages (Schulman et al. 2015, equation 16) from `rewards` and `values`.

    Rows that the optional `row_weights` of the rewards leave out have no advantage and do not count in any mean.
    """
    mask_BT, values_BT = rewards.mask("rewards"), values["values"].float()
    weights_B = row_weights(rewards, mask_BT)
    mask_BT = mask_BT * weights_B[:, None]
    raw_BT = gae_advantages(rewards["rewards"], values_BT, mask_BT, settings.gamma, settings.lam)
    returns_BT = (raw_BT + values_BT) * mask_BT
    advantages_BT = whiten(raw_BT, mask_BT) if settings.whiten_advantages else raw_BT
    metrics = {
        "advantage_mean": float(masked_mean(raw_BT, mask_BT)),
        "advantage_deviation": float(masked_variance(raw_BT, mask_BT).sqrt()),
        "return": float(masked_mean(returns_BT, mask_BT)),
        "value": float(masked_mean(values_BT, mask_BT)),
        "explained_variance": explained_variance(values_BT, returns_BT, mask_BT),
    }
    return Computed({"advantages": advantages_BT, "returns": returns_BT, "row_weights": weights_B}, metrics)


def gae_advantages(rewards_BT: Tensor, values_BT: Tensor, mask_BT: Tensor, gamma: float, lam: float) -> Tensor:
    """Return A_t = sum over k of (gamma * lam)^k * delta_(t+k), where delta_t = r_t + gamma * V_(t+1) - V_t.

    V is 0 after the end.

    >>> import torch
    >>> one_row = (torch.tensor([[0.0, 1.0]]), torch.tensor([[0.5, 0.25]]), torch.ones(1, 2))
    >>> gae_advantages(*one_row, gamma=1.0, lam=0.5)  # deltas -0.25, 0.75
    tensor([[0.1250, 0.7500]])
    """
    values_BT = values_BT * mask_BT
    next_values_BT = values_BT.new_zeros(values_BT.shape)
    next_values_BT[:, :-1] = values_BT[:, 1:]
    deltas_BT = (rewards_BT + gamma * next_values_BT - values_BT) * mask_BT
    advantages_BT, to_come_B = deltas_BT.new_zeros(deltas_BT.shape), deltas_BT.new_zeros(len(deltas_BT))
    for t in reversed(range(deltas_BT.shape[1])):
        to_come_B = deltas_BT[:, t] + gamma * lam * to_come_B
        advantages_BT[:, t] = to_come_B
    return advantages_BT * mask_BT


def explained_variance(values_BT: Tensor, returns_BT: Tensor, mask_BT: Tensor) -> float:
    """Return the share of the returns' variance that the values predict: 1 is perfect, 0 no better than a constant."""
    variance = float(masked_variance(returns_BT, mask_BT))
    unexplained = float(masked_variance(returns_BT - values_BT, mask_BT))
    return 1 - unexplained / variance if variance > 0 else 0.0


@computation("keep")
def informative(rollout: Batch, scores: Batch, settings: Settings) -> Computed:
    """Keep the groups whose scores differ; all other groups have advantage 0 (Yu et al. 2025, equation 11).

    A group is kept or dropped as a whole. A score that is not finite does not count.
    """
    scores_B = scores["scores"].float()
    stats = group_scores(scores_B.where(scores_B.isfinite(), float("nan")), rollout.groups)
    return Computed({"keep": stats.deviation_B > 0})


@computation("advantages", "row_weights", "group_tokens", "group_rows")
def grpo_advantages(
    rollout: Batch, scores: Batch, reference: Batch | None = None, recomputed: Batch | None = None, *, settings: GRPO
) -> Computed:
    """Compute `advantages` [B, T] from the scores, by the method that the setting `advantage` names.

    `reference` has the reference model's `logprobs` and is needed for KL in the reward. `recomputed` has the training
    engine's `logprobs`, which replace those from generation. The other outputs have shape [B]. `row_weights` is 0.0 for
    a row outside the loss: its score is not finite, or it was cut off and is masked. `group_tokens` and `group_rows`
    count the tokens and rows of the row's group in the loss; means over groups need them. The score of a masked row
    still counts in its group's mean, as in DAPO.
    """
    mask_BT, lengths_B, limit = response_mask(rollout), response_lengths(rollout), settings.sampling.max_new_tokens
    scores_B = scores["scores"].float()
    scores_B = scores_B.where(scores_B.isfinite(), float("nan"))
    truncated_B = truncated_rows(rollout, limit)
    weights_B = (~scores_B.isnan()).float() * ((1 - truncated_B) if settings.overlong.mask else 1)
    trained_BT = mask_BT * weights_B[:, None]
    metrics = group_metrics(scores_B, named_rewards(scores), rollout.groups) | {
        "response_tokens": float(lengths_B.mean()),
        "truncated": float(truncated_B.mean()),
        "trained_tokens": float(trained_BT.sum()) * settings.update.epochs,
    }
    shaped_B = scores_B
    if settings.overlong.buffer is not None:
        lost_B = settings.overlong.penalty * overlong_penalty(lengths_B, limit, settings.overlong.buffer)
        shaped_B, metrics = shaped_B + lost_B, metrics | {"overlong_penalty": float(lost_B.mean())}
    penalties_BT = kl_penalties(rollout if recomputed is None else recomputed, reference, mask_BT, settings.kl)
    if penalties_BT is not None:
        metrics |= {"kl": float(penalties_BT.sum(1).mean()) / settings.kl.coefficient}
    advantages_BT = _advantages(shaped_B, penalties_BT, scores, rollout.groups, trained_BT, settings)
    groups, tokens_B = groups_of(rollout.groups), trained_BT.sum(1)
    columns = {
        "advantages": advantages_BT * trained_BT,
        "row_weights": weights_B,
        "group_tokens": groups.totals(tokens_B),
        "group_rows": groups.totals((tokens_B > 0).float()),
    }
    return Computed(columns, metrics)


def _advantages(
    shaped_B: Tensor, penalties_BT: Tensor | None, scores: Batch, groups_B: Tensor, trained_BT: Tensor, settings: GRPO
) -> Tensor:
    """Return [B, T], or [B, 1] if the advantages are equal at all tokens.

    Except for REINFORCE++, the KL penalties of a response's tokens are summed and subtracted from its score.
    """
    if settings.advantage == "gdpo":
        rewards_KB, weights = weighted_rewards(named_rewards(scores), settings)
        rewards_KB = rewards_KB.masked_fill(shaped_B.isnan(), float("nan"))
        return group_advantages.gdpo(rewards_KB, weights, groups_B)[:, None]
    if settings.advantage == "reinforce_plus_plus":
        lost_BT = trained_BT.new_zeros(trained_BT.shape) if penalties_BT is None else penalties_BT
        return group_advantages.reinforce_plus_plus(shaped_B, lost_BT, trained_BT)
    if penalties_BT is not None:
        shaped_B = shaped_B - penalties_BT.sum(1)
    if settings.advantage == "reinforce_plus_plus_baseline":
        return group_advantages.reinforce_plus_plus_baseline(shaped_B, groups_B, trained_BT)
    by_row = {"grpo": group_advantages.grpo, "dr_grpo": group_advantages.dr_grpo, "rloo": group_advantages.rloo}
    return by_row[settings.advantage](shaped_B, groups_B)[:, None]


@computation("advantages", "row_weights")
def remax_advantages(rewards: Batch, baselines: Batch, settings: ReMax) -> Computed:
    """Compute `advantages`: the rewards (score and KL penalty) summed from t to T, less the greedy response's score.

    `row_weights` is 0.0 for a row without a finite baseline and for a row that the `row_weights` of the rewards leave
    out.
    """
    baselines_B = baselines["scores"].float()
    weights_B = row_weights(rewards, baselines_B) * baselines_B.isfinite().float()
    mask_BT = rewards.mask("rewards") * weights_B[:, None]
    to_come_BT = rewards["rewards"].flip(1).cumsum(1).flip(1)
    advantages_BT = (to_come_BT - baselines_B.nan_to_num(0.0, 0.0, 0.0)[:, None]) * mask_BT
    metrics = {"baseline": mean_of(baselines_B), "advantage_mean": float(masked_mean(advantages_BT, mask_BT))}
    return Computed({"advantages": advantages_BT, "row_weights": weights_B}, metrics)
