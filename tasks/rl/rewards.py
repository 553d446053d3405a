"""Rewards per token: the reward model's score at the last token, less the KL penalty at every token.

Shapes: B rows, T response tokens.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from prefect_rlhf.engines.compute import Computed, saved_state
from prefect_rlhf.engines.rows import Batch
from prefect_rlhf.tasks.rl.kl import kl_estimate, next_coefficient
from prefect_rlhf.tasks.rl.masked import last_token, masked_mean, mean_of, own_tokens, response_mask, row_sums
from prefect_rlhf.tasks.rl.settings.online import PPO, ReMax
from prefect_rlhf.tasks.settings import Settings
from prefect_rlhf.tasks.tracing.operations import computation

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, slots=True)
class RunningScores:
    """Count, mean and sum of squared deviations of all scores so far (Welford's merge)."""

    count: int = 0
    mean: float = 0.0
    squares: float = 0.0

    def with_batch(self, scores_B: Tensor) -> RunningScores:
        """Return the statistics with these scores included."""
        if not len(scores_B):
            return self
        count, mean = len(scores_B), float(scores_B.double().mean())
        squares = float((scores_B.double() - mean).square().sum())
        total, shift = self.count + count, mean - self.mean
        return RunningScores(
            total, self.mean + shift * count / total, self.squares + squares + shift**2 * self.count * count / total
        )

    def scale(self, scores_B: Tensor) -> Tensor:
        """Return the scores minus the mean, divided by the standard deviation."""
        deviation = math.sqrt(self.squares / max(self.count - 1, 1))
        return (scores_B - self.mean) / max(deviation, 1e-8)


@saved_state
@dataclass(frozen=True, slots=True)
class RewardState:
    """The state that a step passes to the next step."""

    coefficient: float
    scores: RunningScores = RunningScores()


@computation("rewards", "row_weights", stateful=True)
def kl_penalised_rewards(
    policy: Batch,
    reference: Batch,
    scores: Batch,
    rollout: Batch | None = None,
    *,
    settings: PPO | ReMax,
    state: RewardState | None = None,
) -> Computed:
    """Compute `rewards` from `logprobs` of the policy, `logprobs` of the reference and `scores`.

    `row_weights` [B] is 0.0 for a row whose score is not finite. The reward of such a row is the KL penalty alone, and
    the row is left out of losses and of statistics of scores. The coefficient is the value that the previous step
    computed (Ziegler et al. 2019, section 2.2). If an input has a `mask`, tokens with mask 0.0 have neither reward nor
    penalty, and the score is at the last token with mask 1.0.
    """
    state = state or RewardState(settings.kl.coefficient)
    mask_BT = own_tokens("logprobs", policy, reference, scores, rollout)
    logprobs_BT, scores_B = policy["logprobs"], scores["scores"].float()
    kl_BT = kl_estimate(logprobs_BT, reference["logprobs"], settings.kl.estimator) * mask_BT
    scored_B = scores_B.isfinite()
    state = replace(state, scores=state.scores.with_batch(scores_B[scored_B]))
    shaped_B = shape_scores(scores_B, state.scores, settings).where(scored_B, scores_B.new_zeros(()))
    rewards_BT = token_rewards(shaped_B, kl_BT, mask_BT, state.coefficient)
    metrics = {
        "kl_coefficient": state.coefficient,
        "reward": mean_of(row_sums(rewards_BT, mask_BT)[scored_B]),
        **rollout_metrics(logprobs_BT, kl_BT, scores_B, mask_BT),
    }
    coefficient = next_coefficient(state.coefficient, metrics["kl"], len(scores_B), settings.kl)
    columns = {"rewards": rewards_BT, "row_weights": scored_B.float()}
    return Computed(columns, metrics, replace(state, coefficient=coefficient))


def token_rewards(scores_B: Tensor, kl_BT: Tensor, mask_BT: Tensor, coefficient: float) -> Tensor:
    """Return [B, T]: minus coefficient * kl at each token, plus the score at the last."""
    return (scores_B[:, None] * last_token(mask_BT) - coefficient * kl_BT) * mask_BT


def shape_scores(scores_B: Tensor, running: RunningScores, settings: PPO | ReMax) -> Tensor:
    """Return the scores that enter the reward: normalised by all scores so far, and clipped, if the settings say so."""
    scaled_B = running.scale(scores_B) if settings.normalise_scores else scores_B
    return scaled_B if settings.score_clip is None else scaled_B.clamp(-settings.score_clip, settings.score_clip)


def rollout_metrics(logprobs_BT: Tensor, kl_BT: Tensor, scores_B: Tensor, mask_BT: Tensor) -> dict[str, float]:
    """Return metrics of a step's responses; `entropy` is estimated as minus the mean log-probability of their tokens.

    Metrics of scores are over the finite scores; `unscored` is the share of the other scores.
    """
    left_B = scores_B[scores_B.isfinite()]
    return {
        "kl": float(row_sums(kl_BT, mask_BT).mean()),
        "kl_per_token": float(masked_mean(kl_BT, mask_BT)),
        "score": mean_of(left_B),
        "score_deviation": float(left_B.std(correction=0)) if len(left_B) else 0.0,
        "unscored": 1 - len(left_B) / len(scores_B),
        "entropy": -float(masked_mean(logprobs_BT, mask_BT)),
        "response_tokens": float(mask_BT.sum(1).mean()),
    }


@computation()
def compare_logprobs(rollout: Batch, recomputed: Batch, settings: Settings) -> Computed:
    """Measure how far generation's log-probabilities are from the training engine's, under the same weights."""
    mask_BT = response_mask(rollout)
    difference_BT = (recomputed["logprobs"] - rollout["logprobs"]) * mask_BT
    metrics = {"mean": float(masked_mean(difference_BT.abs(), mask_BT)), "max": float(difference_BT.abs().max())}
    return Computed(metrics=metrics)
