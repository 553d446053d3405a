"""Losses as values per token or per pair; `.on(...)` or their settings choose how the values are averaged.

The formulas of policy losses precede the losses that use them; losses on pairs of answers are in
`preference_losses.py`. Shapes: B rows, T response tokens (right-padded; `mask` is 1.0 at trained tokens), P pairs (row
2p chosen, 2p+1 rejected).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING

from prefect_rlhf.engines.losses.protocol import LossValues
from prefect_rlhf.tasks.rl.kl import kl_estimate
from prefect_rlhf.tasks.rl.masked import row_sums
from prefect_rlhf.tasks.rl.settings.online import GRPO, PPO, ReMax, Reward
from prefect_rlhf.tasks.settings import Settings
from prefect_rlhf.tasks.tracing.operations import loss

if TYPE_CHECKING:
    from torch import Tensor


REF_LOGPROBS = "ref_inference.logprobs"  # output of the call `inference(ref, ...)`; plain `logprobs` are the policy's


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


@loss("logprobs")
def ppo_clip(logprobs_BT: Tensor, batch: Mapping[str, Tensor], settings: PPO) -> LossValues:
    """PPO's clipped surrogate (Schulman et al. 2017, equation 7) on `advantages` and the old policy's `logprobs`.

    The old policy is the policy that wrote the responses, however many steps ago. The advantages were sampled under it,
    so the ratio to it corrects for the difference, and the clip keeps the new policy near it.
    """
    log_ratio_BT = logprobs_BT - batch["logprobs"]
    ratio_BT, lowest, highest = log_ratio_BT.exp(), 1 - settings.clip, 1 + settings.clip
    losses_BT = clipped_surrogate(ratio_BT, batch["advantages"], lowest, highest)
    if "importance" in batch:
        losses_BT = losses_BT * batch["importance"]
    metrics = ratio_metrics(ratio_BT, log_ratio_BT, lowest, highest) | {"entropy": -logprobs_BT}
    return LossValues(losses_BT, metrics)


def ratio_metrics(ratio_BT: Tensor, log_ratio_BT: Tensor, lowest: float, highest: float) -> dict[str, Tensor]:
    """Return metrics, per token, of the policy's distance from the old policy; the loss clips `ratio_BT`.

    In the first mini-batch, `change` is the absolute difference between the log-probabilities of the two engines.
    """
    return {
        "clip_fraction": ((ratio_BT < lowest) | (ratio_BT > highest)).to(ratio_BT.dtype),
        "approx_kl": log_ratio_BT.expm1() - log_ratio_BT,
        "ratio": ratio_BT,
        "change": log_ratio_BT.abs(),
    }


@loss("values")
def value_clip(values_BT: Tensor, batch: Mapping[str, Tensor], settings: PPO) -> LossValues:
    """Half the squared error of values against `returns`, pessimistic about moves beyond `value_clip` from `values`."""
    returns_BT, old_BT = batch["returns"], batch["values"]
    error_BT = (values_BT - returns_BT).square()
    worst_BT = error_BT
    if settings.value_clip is not None:
        near_BT = old_BT + (values_BT - old_BT).clamp(-settings.value_clip, settings.value_clip)
        worst_BT = error_BT.maximum((near_BT - returns_BT).square())
    clipped_BT = (worst_BT > error_BT).float()
    return LossValues(0.5 * worst_BT, {"clip_fraction": clipped_BT, "squared_error": error_BT})


@loss("logprobs")
def policy_gradient(logprobs_BT: Tensor, batch: Mapping[str, Tensor], settings: Settings) -> LossValues:
    """REINFORCE (Williams 1992): minus `advantages` times the log-probability of each token."""
    return LossValues(-batch["advantages"] * logprobs_BT, {"entropy": -logprobs_BT})


@loss("logprobs")
def nll(logprobs_BT: Tensor, batch: Mapping[str, Tensor], settings: Settings) -> LossValues:
    """Minus the log-probability of each token: the loss of pretraining and supervised fine-tuning."""
    return LossValues(-logprobs_BT)


@loss("logprobs")
def weighted_policy_gradient(logprobs_BT: Tensor, batch: Mapping[str, Tensor], settings: ReMax) -> LossValues:
    """REINFORCE on an older policy's responses: min(ratio to that policy, max_ratio) weights each token's gradient.

    This is truncated importance sampling (Ionides 2008; per token as in V-trace, Espeholt et al. 2018,
    arXiv:1802.01561): the cap bounds the variance and adds a bias. The loss is minus the advantage times the ratio.
    Above the cap, the ratio continues linearly in the log-ratio, with its slope at the cap. If both policies are equal,
    the gradient is that of `policy_gradient`.
    """
    log_ratio_BT, log_cap = logprobs_BT - batch["logprobs"], math.log(settings.max_ratio)
    above_BT = (log_ratio_BT - log_cap).clamp(min=0)
    surrogate_BT = log_ratio_BT.clamp(max=log_cap).exp() + settings.max_ratio * above_BT
    if "importance" in batch:
        surrogate_BT = surrogate_BT * batch["importance"]
    metrics = {"entropy": -logprobs_BT, "truncated_fraction": (above_BT > 0).float()}
    return LossValues(-batch["advantages"] * surrogate_BT, metrics)


@loss("logprobs")
def grpo(logprobs_BT: Tensor, batch: Mapping[str, Tensor], settings: GRPO) -> LossValues:
    """The loss for GRPO and its variants, as the settings say: `loss` on the ratio, times `importance`, plus KL.

    The ratio is to `logprobs`. With default settings this is equation 3 of Shao et al. 2024: the clipped surrogate plus
    the KL term (equation 4), averaged over each response and then over responses; `mean_over` selects other means. If
    the loss has no KL term, it needs no reference; if you give one, the KL is only a metric.
    """
    old_BT, advantages_BT, (lowest, highest) = batch["logprobs"], batch["advantages"], settings.ratio_bounds
    log_ratio_BT = logprobs_BT - old_BT
    ratio_BT = sequence_ratio(logprobs_BT, old_BT, batch["mask"]) if settings.loss == "gspo" else log_ratio_BT.exp()
    if settings.loss == "cispo":
        losses_BT = weighted_gain(logprobs_BT, ratio_BT, advantages_BT, lowest, highest)
    else:
        losses_BT = clipped_surrogate(ratio_BT, advantages_BT, lowest, highest)
    if settings.importance is not None or "importance" in batch:
        losses_BT = losses_BT * batch["importance"]
    metrics = ratio_metrics(ratio_BT, log_ratio_BT, lowest, highest) | {"entropy": -logprobs_BT}
    if not settings.kl.in_loss and REF_LOGPROBS not in batch:
        return LossValues(losses_BT, metrics)
    kl_BT = kl_estimate(logprobs_BT, batch[REF_LOGPROBS], settings.kl.estimator)
    of_response = {} if settings.mean_over == "tokens" else {"kl": row_sums(kl_BT, batch["mask"])}
    with_kl_BT = losses_BT + settings.kl.coefficient * kl_BT if settings.kl.in_loss else losses_BT
    return LossValues(with_kl_BT, metrics | {"kl_per_token": kl_BT} | of_response)


@loss("scores", rows_per_item=2)
def bradley_terry(scores_B: Tensor, batch: Mapping[str, Tensor], settings: Reward) -> LossValues:
    """The loss for reward models: -log sigmoid(chosen score - rejected score).

    `centering` adds itself times the squared sum of a pair's scores, which keeps scores near 0.
    """
    chosen_P, rejected_P = scores_B[0::2], scores_B[1::2]
    margins_P = chosen_P - rejected_P
    losses_P = -log_sigmoid(margins_P) + settings.centering * (chosen_P + rejected_P).square()
    accuracy_P = (margins_P > 0).float()
    return LossValues(losses_P, {"accuracy": accuracy_P, "margin": margins_P, "score": (chosen_P + rejected_P) / 2})


def log_sigmoid(logits: Tensor) -> Tensor:
    """Return log(sigmoid(logits)), elementwise."""
    from torch.nn.functional import logsigmoid  # only here: a flow is traced, and planned, without torch

    return logsigmoid(logits)
