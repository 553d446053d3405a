"""Advantages with a critic (GAE), and ReMax's advantages over a greedy response's score.

For advantages from groups of responses see `group_advantages.py`. Shapes: B rows, T response tokens.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from prefect_rlhf.engines.compute import Computed
from prefect_rlhf.engines.rows import Batch
from prefect_rlhf.tasks.rl.masked import masked_mean, masked_variance, means, own_tokens, row_weights, whiten
from prefect_rlhf.tasks.rl.settings.online import PPO, ReMax
from prefect_rlhf.tasks.tracing.operations import computation

if TYPE_CHECKING:
    from torch import Tensor


@computation("advantages", "returns", "row_weights")
def gae(rewards: Batch, values: Batch, rollout: Batch | None = None, *, settings: PPO) -> Computed:
    """Estimate generalised advantages (Schulman et al. 2015, equation 16) from `rewards` and `values`.

    The value after a response is 0, also after a response that was cut: to be cut counts as an end. If an input has a
    `mask`, only tokens with mask 1.0 count: the next value is the next such token's. All other tokens have advantage 0.
    If the rewards come with `row_weights`, a row with weight 0.0 has advantage 0 and counts in no mean.
    """
    mask_BT, values_BT = own_tokens("rewards", rewards, values, rollout), values["values"].float()
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

    Here t + 1 is the next token with mask 1.0, and V is 0 after the last. Tokens with mask 0.0 are skipped.

    >>> import torch
    >>> one_row = (torch.tensor([[0.0, 1.0]]), torch.tensor([[0.5, 0.25]]), torch.ones(1, 2))
    >>> gae_advantages(*one_row, gamma=1.0, lam=0.5)  # deltas -0.25, 0.75
    tensor([[0.1250, 0.7500]])
    """
    advantages_BT = values_BT.new_zeros(values_BT.shape)
    to_come_B = next_values_B = values_BT.new_zeros(len(values_BT))
    for t in reversed(range(values_BT.shape[1])):
        own_B = mask_BT[:, t] > 0
        deltas_B = rewards_BT[:, t] + gamma * next_values_B - values_BT[:, t]
        to_come_B = (deltas_B + gamma * lam * to_come_B).where(own_B, to_come_B)
        next_values_B = values_BT[:, t].where(own_B, next_values_B)
        advantages_BT[:, t] = to_come_B
    return advantages_BT * mask_BT


def explained_variance(values_BT: Tensor, returns_BT: Tensor, mask_BT: Tensor) -> float:
    """Return the share of the returns' variance that the values predict: 1 is perfect, 0 no better than a constant."""
    variance = float(masked_variance(returns_BT, mask_BT))
    unexplained = float(masked_variance(returns_BT - values_BT, mask_BT))
    return 1 - unexplained / variance if variance > 0 else 0.0


@computation("advantages", "row_weights")
def remax_advantages(rewards: Batch, baselines: Batch, rollout: Batch | None = None, *, settings: ReMax) -> Computed:
    """Compute `advantages`: rewards (score and KL penalty) summed from t to T, less the greedy response's score.

    If `rewards` or `rollout` has a `mask`, tokens with mask 0.0 have advantage 0, and their rewards do not count.
    `row_weights` is 0.0 for a row without a finite baseline, and where the rewards' own `row_weights` are 0.0.
    """
    baselines_B = baselines["scores"].float()
    weights_B = row_weights(rewards, baselines_B) * baselines_B.isfinite().float()
    mask_BT = own_tokens("rewards", rewards, rollout) * weights_B[:, None]
    to_come_BT = (rewards["rewards"] * mask_BT).flip(1).cumsum(1).flip(1)
    advantages_BT = (to_come_BT - baselines_B.nan_to_num(0.0, 0.0, 0.0)[:, None]) * mask_BT
    metrics = means({"baseline": baselines_B}) | {"advantage_mean": float(masked_mean(advantages_BT, mask_BT))}
    return Computed({"advantages": advantages_BT, "row_weights": weights_B}, metrics)
