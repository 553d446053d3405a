"""Losses of a policy per token, from its log-probabilities, the old policy's, and advantages.

Shapes: B rows, T response tokens.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor


def clipped_surrogate(ratio_BT: Tensor, advantages_BT: Tensor, lowest: float, highest: float) -> Tensor:
    """Return -min(r * A, clip(r, lowest, highest) * A): the lower of the clipped and the unclipped gain, as a loss.

    Schulman et al. 2017, equation 7, with lowest = 1 - clip and highest = 1 + clip; with different bounds Yu et al.
    2025 (DAPO), equation 10.

    >>> import torch
    >>> clipped_surrogate(torch.tensor([1.5, 0.5]), torch.tensor([1.0, -1.0]), 0.8, 1.2)
    tensor([-1.2000,  0.8000])
    """
    clipped_BT = ratio_BT.clamp(lowest, highest)
    return (-advantages_BT * ratio_BT).maximum(-advantages_BT * clipped_BT)


def sequence_ratio(logprobs_BT: Tensor, old_logprobs_BT: Tensor, mask_BT: Tensor) -> Tensor:
    """Return [B, T]: the response's ratio s at every token; each token carries its own part of the gradient.

    s_i = exp(1/n_i * sum over t of log(p_it / old_it)), and s_it = sg[s_i] * p_it / sg[p_it]; sg stops the gradient
    (Zheng et al. 2025, GSPO, arXiv:2507.18071, equations 7 and 14). In the clipped surrogate, as a mean over rows of
    equal advantages, this is equation 5 with its gradient; advantages may also differ by token.
    """
    log_ratio_BT = (logprobs_BT - old_logprobs_BT) * mask_BT
    mean_B1 = log_ratio_BT.sum(1, keepdim=True) / mask_BT.sum(1, keepdim=True).clamp(min=1)
    return (mean_B1.detach() + logprobs_BT - logprobs_BT.detach()).exp()


def weighted_gain(
    logprobs_BT: Tensor, ratio_BT: Tensor, advantages_BT: Tensor, lowest: float, highest: float
) -> Tensor:
    """Return -sg[clip(r, lowest, highest)] * A * log p, as a loss: every token has a gradient of bounded weight.

    MiniMax 2025 (CISPO, arXiv:2506.13585), equations 4 and 5; sg stops the gradient. The value does not estimate the
    gain; only the gradient is meaningful.
    """
    return -ratio_BT.detach().clamp(lowest, highest) * advantages_BT * logprobs_BT
