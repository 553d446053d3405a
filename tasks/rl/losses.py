"""Losses as sums over tokens or pairs and the weights they are means over: any split of the rows gives one gradient.

Shapes: B rows, T response tokens (right-padded, `mask` 1.0 where one exists), P pairs (row 2p chosen, 2p+1 rejected).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING

from prefect_rlhf.engines.engine import LossTerms
from prefect_rlhf.tasks.operations import loss
from prefect_rlhf.tasks.rl.hyperparameters import DPO, GRPO, PPO, ReMax, Reward
from prefect_rlhf.tasks.rl.kl import kl_k3
from prefect_rlhf.tasks.rl.masked import row_means, row_sums
from prefect_rlhf.tasks.settings import Settings

if TYPE_CHECKING:
    from torch import Tensor

REF_LOGPROBS = "ref_inference.logprobs"  # what the call `inference(ref, ...)` made; plain `logprobs` are the policy's


@loss("logprobs")
def ppo_clip(logprobs_BT: Tensor, batch: Mapping[str, Tensor], settings: PPO) -> LossTerms:
    """The clipped surrogate (Schulman et al. 2017, equation 7) over `advantages` and the old policy's `logprobs`.

    The old policy is the one that made the responses, however many steps ago: under it the advantages were sampled, so
    the ratio to it is what corrects for the difference, and the clip keeps the new policy near it.
    """
    mask_BT = batch["mask"]
    losses_BT, ratio_BT = clipped_surrogate(logprobs_BT, batch["logprobs"], batch["advantages"], settings.clip)
    log_ratio_BT = logprobs_BT - batch["logprobs"]
    return token_terms(
        losses_BT,
        mask_BT,
        clip_fraction=((ratio_BT - 1).abs() > settings.clip).float(),
        approx_kl=ratio_BT - 1 - log_ratio_BT,
        ratio=ratio_BT,
        change=log_ratio_BT.abs(),  # in the first mini-batch, how far the two engines' log-probabilities are apart
        entropy=-logprobs_BT,
    )


def clipped_surrogate(
    logprobs_BT: Tensor, old_logprobs_BT: Tensor, advantages_BT: Tensor, clip: float
) -> tuple[Tensor, Tensor]:
    """Return the loss per token, the pessimistic of clipped and unclipped, and the ratio of new to old probability."""
    ratio_BT = (logprobs_BT - old_logprobs_BT).exp()
    clipped_BT = ratio_BT.clamp(1 - clip, 1 + clip)
    return (-advantages_BT * ratio_BT).maximum(-advantages_BT * clipped_BT), ratio_BT


@loss("values")
def value_clip(values_BT: Tensor, batch: Mapping[str, Tensor], settings: PPO) -> LossTerms:
    """Half the squared error of values against `returns`, pessimistic about moves beyond `value_clip` from `values`."""
    mask_BT, returns_BT, old_BT = batch["mask"], batch["returns"], batch["values"]
    error_BT = (values_BT - returns_BT).square()
    worst_BT = error_BT
    if settings.value_clip is not None:
        near_BT = old_BT + (values_BT - old_BT).clamp(-settings.value_clip, settings.value_clip)
        worst_BT = error_BT.maximum((near_BT - returns_BT).square())
    clipped_BT = (worst_BT > error_BT).float()
    return token_terms(0.5 * worst_BT, mask_BT, clip_fraction=clipped_BT, squared_error=error_BT)


@loss("logprobs")
def policy_gradient(logprobs_BT: Tensor, batch: Mapping[str, Tensor], settings: Settings) -> LossTerms:
    """REINFORCE (Williams 1992): minus `advantages` times the log-probability of each token."""
    return token_terms(-batch["advantages"] * logprobs_BT, batch["mask"], entropy=-logprobs_BT)


@loss("logprobs")
def weighted_policy_gradient(logprobs_BT: Tensor, batch: Mapping[str, Tensor], settings: ReMax) -> LossTerms:
    """REINFORCE on responses of an older policy: each token's gradient counts by min(ratio to that policy, max_ratio).

    Truncated importance sampling (Ionides 2008; per token as in V-trace, Espeholt et al. 2018, arXiv:1802.01561): the
    cap bounds the variance at the price of a bias. The loss is minus the advantage times the ratio, which goes on above
    the cap with the slope that it has there. Where both policies are equal its gradient is that of `policy_gradient`.
    """
    log_ratio_BT, log_cap = logprobs_BT - batch["logprobs"], math.log(settings.max_ratio)
    above_BT = (log_ratio_BT - log_cap).clamp(min=0)
    surrogate_BT = log_ratio_BT.clamp(max=log_cap).exp() + settings.max_ratio * above_BT
    return token_terms(
        -batch["advantages"] * surrogate_BT,
        batch["mask"],
        entropy=-logprobs_BT,
        truncated_fraction=(above_BT > 0).float(),
    )


@loss("logprobs")
def grpo(logprobs_BT: Tensor, batch: Mapping[str, Tensor], settings: GRPO) -> LossTerms:
    """Clipped surrogate plus KL term, mean over each response, then over responses (Shao et al. 2024, equation 3)."""
    mask_BT = batch["mask"]
    losses_BT, ratio_BT = clipped_surrogate(logprobs_BT, batch["logprobs"], batch["advantages"], settings.clip)
    kl_BT = kl_k3(logprobs_BT, batch[REF_LOGPROBS])
    clipped_BT = ((ratio_BT - 1).abs() > settings.clip).float()
    total = row_means(losses_BT + settings.kl_coefficient * kl_BT, mask_BT).sum()
    metrics = {
        "kl": row_sums(kl_BT, mask_BT),
        "clip_fraction": row_means(clipped_BT, mask_BT),
        "entropy": row_means(-logprobs_BT, mask_BT),
    }
    return LossTerms(total, mask_BT.new_tensor(len(mask_BT)), _sums(metrics))


@loss("scores", rows_per_item=2)
def bradley_terry(scores_B: Tensor, batch: Mapping[str, Tensor], settings: Reward) -> LossTerms:
    """Minus the log-probability that the chosen answer wins: sigmoid of the scores' difference."""
    chosen_P, rejected_P = scores_B[0::2], scores_B[1::2]
    margins_P = chosen_P - rejected_P
    losses_P = -log_sigmoid(margins_P) + settings.centering * (chosen_P + rejected_P).square()
    accuracy_P = (margins_P > 0).float()
    return pair_terms(losses_P, accuracy=accuracy_P, margin=margins_P, score=(chosen_P + rejected_P) / 2)


@loss("logprobs", rows_per_item=2)
def dpo(logprobs_BT: Tensor, batch: Mapping[str, Tensor], settings: DPO) -> LossTerms:
    """Bradley-Terry on beta times the log-ratio of policy to reference (Rafailov et al. 2023, equation 7)."""
    rewards_B = settings.beta * row_sums(logprobs_BT - batch[REF_LOGPROBS], batch["mask"])
    chosen_P, rejected_P = rewards_B[0::2], rewards_B[1::2]
    margins_P = chosen_P - rejected_P
    wrong = settings.label_smoothing
    losses_P = -(1 - wrong) * log_sigmoid(margins_P) - wrong * log_sigmoid(-margins_P)
    accuracy_P = (margins_P > 0).float()
    return pair_terms(
        losses_P, accuracy=accuracy_P, margin=margins_P, chosen_reward=chosen_P, rejected_reward=rejected_P
    )


def log_sigmoid(logits: Tensor) -> Tensor:
    """Return the log-probability of a yes."""
    from torch.nn.functional import logsigmoid  # only here: a flow is traced, and planned, without torch

    return logsigmoid(logits)


def token_terms(losses_BT: Tensor, mask_BT: Tensor, **metrics_BT: Tensor) -> LossTerms:
    """Return a mean over tokens."""
    masked = {name: values_BT * mask_BT for name, values_BT in metrics_BT.items()}
    return LossTerms((losses_BT * mask_BT).sum(), mask_BT.sum(), _sums(masked))


def pair_terms(losses_P: Tensor, **metrics_P: Tensor) -> LossTerms:
    """Return a mean over pairs."""
    return LossTerms(losses_P.sum(), losses_P.new_tensor(len(losses_P)), _sums(metrics_P))


def _sums(metrics: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name: values.detach().sum() for name, values in metrics.items()}
