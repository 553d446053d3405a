"""Advantages without a critic: a response's score relative to the scores of the other responses.

Shapes: B rows, T response tokens, K named rewards. Rows with the same number in `groups_B` are responses to the same
prompt. A score of NaN has advantage 0 and does not count in means or deviations. The advantages of a group are also 0
if it has a single score or equal scores.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from prefect_rlhf.tasks.rl.groups import group_scores
from prefect_rlhf.tasks.rl.masked import masked_mean, masked_variance, whiten

if TYPE_CHECKING:
    from torch import Tensor

EPS = 1e-4  # added to deviations, as in TRL


def grpo(scores_B: Tensor, groups_B: Tensor, eps: float = EPS) -> Tensor:
    """Return [B]: A_i = (r_i - mean(r)) / (std(r) + eps) over the group (Shao et al. 2024, section 4.1.2)."""
    scores = group_scores(scores_B, groups_B)
    return scores.centred_B / (scores.deviation_B + eps)


def dr_grpo(scores_B: Tensor, groups_B: Tensor) -> Tensor:
    """Return [B]: A_i = r_i - mean(r) over the group (Liu et al. 2025, arXiv:2503.20783, section 3.2).

    >>> import torch
    >>> dr_grpo(torch.tensor([1.0, 5.0, 3.0, 5.0]), torch.tensor([0, 1, 0, 1]))
    tensor([-1.,  0.,  1.,  0.])
    """
    return group_scores(scores_B, groups_B).centred_B


def rloo(scores_B: Tensor, groups_B: Tensor) -> Tensor:
    """Return [B]: A_i = r_i - 1/(G-1) * sum over j != i of r_j: leave one out (Ahmadian et al. 2024, arXiv:2402.14740).

    Computed as G/(G-1) * (r_i - mean(r)), which is the same.
    """
    scores = group_scores(scores_B, groups_B)
    return scores.centred_B * scores.count_B / (scores.count_B - 1).clamp(min=1)


def reinforce_plus_plus(scores_B: Tensor, penalties_BT: Tensor, mask_BT: Tensor) -> Tensor:
    """Return [B, T]: A_t = r - sum over k >= t of penalty_k, whitened over all tokens (Hu et al. 2025, REINFORCE++).

    arXiv:2501.03262: penalty_k is beta * log(p_k / ref_k), and A_norm = (A - mean(A)) / std(A) over the batch. Groups
    are not used.
    """
    to_come_BT = (penalties_BT * mask_BT).flip(1).cumsum(1).flip(1)
    return whiten((scores_B.nan_to_num(0.0)[:, None] - to_come_BT) * mask_BT, mask_BT)


def reinforce_plus_plus_baseline(scores_B: Tensor, groups_B: Tensor, mask_BT: Tensor) -> Tensor:
    """Return [B, T]: A_i = r_i - mean(r) over the group, whitened over all tokens (Hu et al. 2025, w/ baseline)."""
    return whiten(dr_grpo(scores_B, groups_B)[:, None] * mask_BT, mask_BT)


def gdpo(rewards_KB: Tensor, weights: Sequence[float], groups_B: Tensor, eps: float = EPS) -> Tensor:
    """Return [B]: the weighted sum of each reward's GRPO advantage, normalised over the batch's rows (GDPO).

    Liu et al. 2026, arXiv:2601.05242: A_k = (r_k - mean(r_k)) / std(r_k) over the group for each reward k, S = sum over
    k of w_k * A_k, and A = (S - mean(S)) / (std(S) + eps) over all rows of the batch. A reward that is NaN does not
    apply to its row. A row without any reward has advantage 0 and is left out of the batch's statistics.
    """
    left_B1 = (~rewards_KB.isnan()).any(0).to(rewards_KB.dtype)[:, None]
    summed_B = sum(
        (weight * grpo(rewards_B, groups_B, eps) for weight, rewards_B in zip(weights, rewards_KB, strict=True)),
        start=rewards_KB.new_zeros(rewards_KB.shape[1]),
    )
    mean, variance = masked_mean(summed_B[:, None], left_B1), masked_variance(summed_B[:, None], left_B1)
    return (summed_B - mean) / (variance.sqrt() + eps) * left_B1[:, 0]
