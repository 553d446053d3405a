"""Importance weights for the mismatch between the engine that generates tokens and the engine that trains on them.

Shapes: B rows, T response tokens.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from prefect_rlhf.engines.compute import Computed
from prefect_rlhf.engines.rows import Batch
from prefect_rlhf.tasks.rl.masked import masked_mean, response_mask
from prefect_rlhf.tasks.rl.settings.policy import Importance
from prefect_rlhf.tasks.tracing.operations import computation

if TYPE_CHECKING:
    from torch import Tensor

LARGEST_LOG = 20.0  # a ratio of 5e8: beyond every bound, and still finite


@computation("importance")
def importance_weights(rollout: Batch, recomputed: Batch, settings: Importance) -> Computed:
    """Compute `importance`: a weight for each token's loss, which corrects for sampling with the generation engine.

    Its metrics are the mean weight, the largest ratio before it is bounded, the share of tokens (or responses) beyond
    the bounds, and the engines' mismatch per token in two measures: KL (generation from training, k3) and chi-squared
    (mean squared ratio minus 1).
    """
    mask_BT = response_mask(rollout)
    log_ratio_BT = (recomputed["logprobs"] - rollout["logprobs"]) * mask_BT
    ratio_BT = importance_ratio(log_ratio_BT, settings.level)
    log_ratio_BT = log_ratio_BT.clamp(-LARGEST_LOG, LARGEST_LOG)
    weights_BT = bounded(ratio_BT, settings) * mask_BT
    beyond_BT = ((ratio_BT < settings.lowest) | (ratio_BT > settings.highest)).float()
    counted_BT = mask_BT if settings.level == "token" else first_token(mask_BT)
    metrics = {
        "importance": float(masked_mean(weights_BT, counted_BT)),
        "largest_ratio": float((ratio_BT * mask_BT).max()),
        "beyond_fraction": float(masked_mean(beyond_BT, counted_BT)),
        "mismatch_kl": float(masked_mean(log_ratio_BT.expm1() - log_ratio_BT, mask_BT)),
        "mismatch_chi2": float(masked_mean((2 * log_ratio_BT).expm1(), mask_BT)),
    }
    return Computed({"importance": weights_BT}, metrics)


def importance_ratio(log_ratio_BT: Tensor, level: str) -> Tensor:
    """Return [B, T]: the probability under training over that under generation, of the token or its whole response.

    Per token exp(log_ratio_t); per sequence exp(sum over t of log_ratio_t), at each token. Log-ratios are 0 at padding.

    >>> import torch
    >>> importance_ratio(torch.tensor([[0.0, 2.0]]).log1p(), "sequence")  # ratios 1 and 3
    tensor([[3., 3.]])
    """
    summed_BT = log_ratio_BT if level == "token" else log_ratio_BT.sum(1, keepdim=True).expand_as(log_ratio_BT)
    return summed_BT.clamp(-LARGEST_LOG, LARGEST_LOG).exp()


def bounded(ratio_BT: Tensor, settings: Importance) -> Tensor:
    """Return the weights: a ratio beyond `lowest` or `highest` becomes that bound (truncate) or 0 (mask).

    Truncated importance sampling, min(ratio, C): Ionides 2008; Yao et al. 2025. Masked: Liu et al. 2025, "When speed
    kills stability". A masked token stays in the denominators of the loss's mean.
    """
    if settings.beyond == "truncate":
        return ratio_BT.clamp(settings.lowest, settings.highest)
    return ratio_BT.masked_fill((ratio_BT < settings.lowest) | (ratio_BT > settings.highest), 0.0)


def first_token(mask_BT: Tensor) -> Tensor:
    """Return [B, T]: 1.0 at each row's first token only, so that a mean over tokens is a mean over rows."""
    return mask_BT * (mask_BT.cumsum(1) == 1).to(mask_BT.dtype)
