"""Advantages: how much better each response token was than expected.

Shapes: B rows, T response tokens, G rows of one prompt.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from prefect_rlhf.engines.compute import Computed
from prefect_rlhf.engines.rows import Batch
from prefect_rlhf.tasks.operations import computation
from prefect_rlhf.tasks.rl.hyperparameters import GRPO, PPO, ReMax
from prefect_rlhf.tasks.rl.masked import masked_mean, masked_variance, whiten

if TYPE_CHECKING:
    from torch import Tensor


@computation("advantages", "returns")
def gae(rewards: Batch, values: Batch, settings: PPO) -> Computed:
    """Estimate generalised advantages (Schulman et al. 2015, equation 16) from `rewards` and `values`."""
    mask_BT, values_BT = rewards.mask("rewards"), values["values"].float()
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
    return Computed({"advantages": advantages_BT, "returns": returns_BT}, metrics)


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


@computation("advantages")
def grpo_advantages(rollout: Batch, scores: Batch, settings: GRPO) -> Computed:
    """Make `advantages`: a response's score relative to those of its group, at each of its tokens."""
    scores_B = scores["scores"].float()
    advantages_B = group_advantages(scores_B, settings.samples_per_prompt, settings.scale_by_deviation)
    mask_BT = rollout.mask("logprobs")
    deviation = scores_B.view(-1, settings.samples_per_prompt).std(1).mean()
    metrics = {
        "score": float(scores_B.mean()),
        "group_deviation": float(deviation),
        "response_tokens": float(mask_BT.sum(1).mean()),
    }
    return Computed({"advantages": advantages_B[:, None] * mask_BT}, metrics)


def group_advantages(scores_B: Tensor, group_size: int, scale_by_deviation: bool, eps: float = 1e-4) -> Tensor:
    """Return [B]: score less the group's mean, over its standard deviation. A group is `group_size` adjacent rows.

    >>> import torch
    >>> group_advantages(torch.tensor([1.0, 3.0, 5.0, 5.0]), 2, scale_by_deviation=False)
    tensor([-1.,  1.,  0.,  0.])
    """
    scores_PG = scores_B.view(-1, group_size)
    centred_PG = scores_PG - scores_PG.mean(1, keepdim=True)
    scale_P1 = scores_PG.std(1, keepdim=True) + eps if scale_by_deviation else 1.0
    return (centred_PG / scale_P1).view(-1)


@computation("advantages")
def remax_advantages(rewards: Batch, baselines: Batch, settings: ReMax) -> Computed:
    """Make `advantages`: the rewards still to come at t..T (score and KL penalty), less the greedy response's score."""
    mask_BT = rewards.mask("rewards")
    to_come_BT = rewards["rewards"].flip(1).cumsum(1).flip(1)
    advantages_BT = (to_come_BT - baselines["scores"].float()[:, None]) * mask_BT
    metrics = {
        "baseline": float(baselines["scores"].float().mean()),
        "advantage_mean": float(masked_mean(advantages_BT, mask_BT)),
    }
    return Computed({"advantages": advantages_BT}, metrics)
