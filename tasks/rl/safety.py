"""Rewards under a limit on costs: the Lagrange multiplier, costs per token, and advantages that combine both.

Shapes: B rows, T response tokens.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from prefect_rlhf.engines.compute import Computed, Context, saved_state
from prefect_rlhf.engines.rows import Batch
from prefect_rlhf.tasks.data.rollouts import EVALUATION, lists, shown_columns, write_rows
from prefect_rlhf.tasks.rl.masked import (
    masked_mean,
    mean_of,
    means,
    own_tokens,
    response_mask,
    row_weights,
    unscored,
    whiten,
)
from prefect_rlhf.tasks.rl.rewards import RewardState, kl_penalised_rewards
from prefect_rlhf.tasks.rl.settings.safety import SafeRLHF
from prefect_rlhf.tasks.settings import Settings
from prefect_rlhf.tasks.tracing.operations import computation


@saved_state
@dataclass(frozen=True, slots=True)
class LagrangeState:
    """The logarithm of the multiplier, and the smoothed mean cost; None before the first step."""

    log_multiplier: float
    cost: float | None = None


@computation("multiplier", stateful=True)
def lagrange_multiplier(costs: Batch, settings: SafeRLHF, state: LagrangeState | None = None) -> Computed:
    """Update the multiplier l by how far the mean cost c exceeds the limit d. Returns it as [B], equal for all rows.

    ln l rises by lr * l * (c - d), up to `most` (Dai et al. 2023, arXiv:2310.12773, on updating the multiplier). c is
    smoothed over steps, and costs that are not finite do not count.
    """
    by = settings.lagrange
    state = state or LagrangeState(math.log(by.start))
    found_B = costs["scores"].double()
    scored = bool(found_B.isfinite().any())
    cost = mean_of(found_B) if scored else settings.limit
    if state.cost is not None:
        cost = by.smoothing * state.cost + (1 - by.smoothing) * (cost if scored else state.cost)
    moved = state.log_multiplier + by.lr * math.exp(state.log_multiplier) * (cost - settings.limit)
    state = LagrangeState(min(moved, math.log(by.most)), cost)
    multiplier = math.exp(state.log_multiplier)
    metrics = {"multiplier": multiplier, **means({"cost": found_B}), "smoothed_cost": cost}
    return Computed({"multiplier": found_B.new_full((len(found_B),), multiplier).float()}, metrics, state)


@computation("rewards", "row_weights", stateful=True)
def kl_penalised_costs(
    policy: Batch,
    reference: Batch,
    costs: Batch,
    rollout: Batch | None = None,
    *,
    settings: SafeRLHF,
    state: RewardState | None = None,
) -> Computed:
    """Compute costs per token, as the key `rewards`: the KL penalty at every token, plus the cost at the last.

    These are the negated `kl_penalised_rewards` of the negated costs, so that a mixture of rewards and costs pays the
    penalty once.
    """
    turned = Batch({"scores": list(-costs["scores"])})
    made = kl_penalised_rewards.function(policy, reference, turned, rollout, settings=settings, state=state)
    columns = {"rewards": -made.columns["rewards"], "row_weights": made.columns["row_weights"]}  # type: ignore[operator]  # a tensor
    metrics = {"cost": -made.metrics["reward"]} if "reward" in made.metrics else {}
    return Computed(columns, metrics, made.state)


@computation("advantages", "row_weights")
def lagrange_advantages(
    rewards: Batch, costs: Batch, multiplier: Batch, rollout: Batch | None = None, *, settings: SafeRLHF
) -> Computed:
    """Mix the reward's and the cost's advantages: (A_r - l A_c) / (1 + l) (Dai et al. 2023, arXiv:2310.12773).

    A row with an unknown reward or cost has advantage 0 and row weight 0. If an input has a `mask`, tokens with mask
    0.0 have advantage 0 and do not count in the whitening.
    """
    weights_B = row_weights(rewards, multiplier["multiplier"]) * row_weights(costs, multiplier["multiplier"])
    mask_BT = own_tokens("advantages", rewards, costs, rollout) * weights_B[:, None]
    by_B1 = multiplier["multiplier"][:, None]
    mixed_BT = (rewards["advantages"] - by_B1 * costs["advantages"]) / (1 + by_B1) * mask_BT
    advantages_BT = whiten(mixed_BT, mask_BT) if settings.whiten_advantages else mixed_BT
    metrics = {"advantage_mean": float(masked_mean(mixed_BT, mask_BT))}
    return Computed({"advantages": advantages_BT, "row_weights": weights_B}, metrics)


@computation()
def record_safe_evaluation(
    rollout: Batch, scores: Batch, costs: Batch, settings: Settings, context: Context
) -> Computed:
    """Write `evaluation/step-000010.parquet`: responses to held-out prompts, each with `reward` and `cost`.

    The metrics are the mean reward and the mean cost, each over the responses that have it; a mean over no value is
    left out. `unscored` is the share of responses without a reward.
    """
    scores_B, costs_B = scores["scores"].float(), costs["scores"].float()
    columns = shown_columns(rollout, scores) | {
        "tokens": lists(rollout, "tokens"),
        "reward": scores_B.tolist(),
        "cost": costs_B.tolist(),
    }
    write_rows(columns, EVALUATION, context)
    response_tokens = float(response_mask(rollout).sum(1).mean())
    metrics = {"unscored": unscored(scores_B), "response_tokens": response_tokens}
    return Computed(metrics=means({"score": scores_B, "cost": costs_B}) | metrics)
