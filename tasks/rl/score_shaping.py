"""Scores for advantages without a critic: KL penalties, length penalties, and the weighted sum of named rewards.

Shapes: B rows, T response tokens, K named rewards.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from prefect_rlhf.engines.rows import Batch
from prefect_rlhf.errors.errors import InvalidInput
from prefect_rlhf.tasks.rl.kl import kl_estimate
from prefect_rlhf.tasks.rl.settings.online import GRPO
from prefect_rlhf.tasks.rl.settings.policy import KLTerm

if TYPE_CHECKING:
    from torch import Tensor


def kl_penalties(policy: Batch, reference: Batch | None, mask_BT: Tensor, kl: KLTerm) -> Tensor | None:
    """Return [B, T]: the KL penalty at each token, coefficient * estimate; None if KL is not in the reward.

    Raises InvalidInput if KL is in the reward but the flow has no reference.
    """
    if not kl.in_reward:
        return None
    if reference is None:
        expected = "the reference's logprobs as the third input, because kl is in the reward"
        raise InvalidInput("inputs of grpo_advantages", "no reference", expected)
    return kl.coefficient * kl_estimate(policy["logprobs"], reference["logprobs"], kl.estimator) * mask_BT


def named_rewards(scores: Batch) -> dict[str, Tensor]:
    """Return the named rewards, [B] each, that `scores` is the weighted sum of; empty if the reward is a single
    function.
    """
    return {
        key: scores[key].float()
        for key, rows in scores.columns.items()
        if key != "scores" and len(rows) and rows[0].dim() == 0 and rows[0].is_floating_point()
    }


def weighted_rewards(named: Mapping[str, Tensor], settings: GRPO) -> tuple[Tensor, list[float]]:
    """Return rewards [K, B] and K weights.

    Raises InvalidInput for fewer than two rewards, and unless the weights name the same rewards.
    """
    import torch  # only here: a flow is traced, and planned, without it

    if len(named) < 2:
        seen = ", ".join(named) or "none"
        raise InvalidInput("named rewards", seen, "two or more: advantage gdpo normalises each reward separately")
    weights = settings.reward_weights or dict.fromkeys(named, 1.0)
    if set(weights) != set(named):
        raise InvalidInput("algo.reward_weights", ", ".join(weights), f"a weight for each of {', '.join(named)}")
    return torch.stack(list(named.values())), [weights[name] for name in named]


def truncated_rows(rollout: Batch, max_new_tokens: int) -> Tensor:
    """Return [B] float: 1.0 for a response that was cut off, from the key `truncated` that `generate` makes.

    In rows of a computation without that key, a response of `max_new_tokens` tokens counts as cut off, even if its last
    token ends it.
    """
    if "truncated" in rollout:
        return rollout["truncated"].float()
    return (response_lengths(rollout) >= max_new_tokens).float()


def response_lengths(rollout: Batch) -> Tensor:
    """Return [B]: the response tokens of each row, trained on or not."""
    return rollout.mask("logprobs").sum(1)


def overlong_penalty(lengths_B: Tensor, max_new_tokens: int, buffer: int) -> Tensor:
    """Return [B], between -1 and 0: the penalty for a response's length (Yu et al. 2025, DAPO, equation 13).

    0 up to L_max - L_cache tokens, (L_max - L_cache - length) / L_cache up to L_max, and -1 beyond; L_max is
    `max_new_tokens`, L_cache `buffer`.

    >>> import torch
    >>> overlong_penalty(torch.tensor([70.0, 90.0, 100.0]), max_new_tokens=100, buffer=20)
    tensor([ 0.0000, -0.5000, -1.0000])
    """
    return ((max_new_tokens - buffer - lengths_B) / buffer).clamp(-1, 0)
