"""The KL divergence between policy and reference model: estimates per token, and the coefficient of its penalty.

Shapes: B rows, T response tokens.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from prefect_rlhf.tasks.rl.settings.online import KLControl
from prefect_rlhf.tasks.rl.settings.policy import Estimator

if TYPE_CHECKING:
    from torch import Tensor

MAX_ERROR = 0.2  # Ziegler et al. 2019: a step reacts to at most 20% of deviation from the target


def kl_k1(logprobs_BT: Tensor, ref_logprobs_BT: Tensor) -> Tensor:
    """Return log p/q of tokens drawn from p: unbiased for KL(p, q); the estimate of a single token may be negative."""
    return logprobs_BT - ref_logprobs_BT


def kl_k3(logprobs_BT: Tensor, ref_logprobs_BT: Tensor) -> Tensor:
    """Return q/p - 1 - log q/p of tokens drawn from p: unbiased for KL(p, q), less noisy, never negative.

    Schulman 2020, "Approximating KL divergence".
    """
    log_ratio_BT = ref_logprobs_BT - logprobs_BT
    return log_ratio_BT.expm1() - log_ratio_BT


def kl_k2(logprobs_BT: Tensor, ref_logprobs_BT: Tensor) -> Tensor:
    """Return half the square of log p/q of tokens drawn from p: biased for KL(p, q), but with an unbiased gradient.

    Schulman 2020, "Approximating KL divergence".
    """
    return (logprobs_BT - ref_logprobs_BT).square() / 2


def kl_estimate(logprobs_BT: Tensor, ref_logprobs_BT: Tensor, estimator: Estimator) -> Tensor:
    """Estimate the KL per token with the named estimator.

    As a loss on tokens that p sampled, the gradient is on average that of KL(p, q) for k2, that of KL(q, p) for k3, and
    zero for k1.
    """
    return {"k1": kl_k1, "k2": kl_k2, "k3": kl_k3}[estimator](logprobs_BT, ref_logprobs_BT)


def next_coefficient(coefficient: float, kl: float, num_responses: int, control: KLControl) -> float:
    """Return the penalty's coefficient after `num_responses` responses with a mean KL of `kl` nats.

    >>> adaptive = KLControl(kind="adaptive", target=4.0, horizon=100.0)
    >>> round(next_coefficient(0.1, kl=4.4, num_responses=10, control=adaptive), 6)  # 0.1 * (1 + 0.1 * 10/100)
    0.101
    """
    if control.kind == "fixed":
        return coefficient
    error = min(max(kl / control.target - 1, -MAX_ERROR), MAX_ERROR)
    return coefficient * (1 + error * num_responses / control.horizon)
