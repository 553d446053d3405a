"""Rewards per token: the reward model's score at the last token, less the KL penalty at every token.

Shapes: B rows, T response tokens.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from prefect_rlhf.engines.compute import Computed, saved_state
from prefect_rlhf.engines.rows import Batch
from prefect_rlhf.errors.errors import InvalidInput
from prefect_rlhf.tasks.rl.groups import score_interval
from prefect_rlhf.tasks.rl.kl import kl_estimate, next_coefficient
from prefect_rlhf.tasks.rl.masked import (
    last_token,
    masked_mean,
    means,
    own_tokens,
    response_mask,
    row_sums,
    unscored,
    within,
)
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
    """State that each step passes to the next."""

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
    """Compute `rewards` [B, T]: the score at each row's last token, less the KL penalty at every token.

    The KL is between the policy's and the reference's `logprobs`. The previous step computed its coefficient (Ziegler
    et al. 2019, section 2.2). `row_weights` [B] is 0.0 for a row whose score is not finite: it gets the KL penalty
    alone, and losses and score statistics leave it out. If an input has a `mask`, tokens with mask 0.0 have neither
    reward nor penalty, and the score is at the last token with mask 1.0. If the scores come from a play, each turn's
    reward is at the turn's last token.
    """
    state = state or RewardState(settings.kl.coefficient)
    mask_BT = own_tokens("logprobs", policy, reference, scores, rollout)
    logprobs_BT, scores_B = policy["logprobs"], scores["scores"].float()
    kl_BT = within(kl_estimate(logprobs_BT, reference["logprobs"], settings.kl.estimator), mask_BT)
    scored_B = scores_B.isfinite()
    state = replace(state, scores=state.scores.with_batch(scores_B[scored_B]))
    shaped_B = shape_scores(scores_B, state.scores, settings).where(scored_B, scores_B.new_zeros(()))
    rewards_BT = placed_scores(shaped_B, scores, mask_BT) - state.coefficient * kl_BT
    metrics = {
        "kl_coefficient": state.coefficient,
        **means({"reward": row_sums(rewards_BT, mask_BT)[scored_B]}),
        **rollout_metrics(logprobs_BT, kl_BT, scores_B, mask_BT),
    }
    coefficient = next_coefficient(state.coefficient, metrics["kl"], len(scores_B), settings.kl)
    columns = {"rewards": rewards_BT, "row_weights": scored_B.float()}
    return Computed(columns, metrics, replace(state, coefficient=coefficient))


def placed_scores(shaped_B: Tensor, scores: Batch, mask_BT: Tensor) -> Tensor:
    """Return [B, T]: the score at each row's last token or, for a play, each turn's reward at the turn's last token.

    A play's row also sums to its shaped score, because the last token gets the rest.
    """
    if "turn_rewards" not in scores.columns:
        return shaped_B[:, None] * last_token(mask_BT)
    by_turn_BK, turn_BT = scores["turn_rewards"].float(), scores["turn"].long()
    next_BT = mask_BT.new_zeros(mask_BT.shape).bool()
    next_BT[:, :-1] = (mask_BT[:, 1:] > 0) & (turn_BT[:, 1:] == turn_BT[:, :-1])
    ends_BT = mask_BT * (~next_BT).float()
    rest_B = shaped_B - by_turn_BK.sum(1)
    return by_turn_BK.gather(1, turn_BT) * ends_BT + rest_B[:, None] * last_token(mask_BT)


def shape_scores(scores_B: Tensor, running: RunningScores, settings: PPO | ReMax) -> Tensor:
    """Return the scores that enter the reward: normalised by all scores so far, and clipped, as the settings say."""
    scaled_B = running.scale(scores_B) if settings.normalise_scores else scores_B
    return scaled_B if settings.score_clip is None else scaled_B.clamp(-settings.score_clip, settings.score_clip)


def rollout_metrics(logprobs_BT: Tensor, kl_BT: Tensor, scores_B: Tensor, mask_BT: Tensor) -> dict[str, float]:
    """Return metrics of a step's responses; `entropy` is estimated as minus the mean log-probability of their tokens.

    Score metrics are over the finite scores, and left out if no score is finite; `unscored` is the share of the others.
    `score_low` and `score_high` are the 95% interval of the mean score, by bootstrap over the rows.
    """
    left_B = scores_B[scores_B.isfinite()]
    deviation = {"score_deviation": float(left_B.std(correction=0))} if len(left_B) else {}
    return {
        "kl": float(row_sums(kl_BT, mask_BT).mean()),
        "kl_per_token": float(masked_mean(kl_BT, mask_BT)),
        **means({"score": left_B}),
        **score_interval(left_B),
        **deviation,
        "unscored": unscored(scores_B),
        "entropy": -float(masked_mean(logprobs_BT, mask_BT)),
        "response_tokens": float(mask_BT.sum(1).mean()),
    }


@computation("scores")
def mean_scores(scores: Batch, settings: Settings) -> Computed:
    """Average the k scores of each row: [B] from [B, k].

    If `samples` are k responses to each of `rows`, then `compute(mean_scores, score(reward, samples), per=rows,
    settings=algo)` estimates the value of `rows` by Monte Carlo, as VinePPO does (Kazemnejad et al. 2024). Missing
    scores (NaN) are left out; a row with no score gets NaN. Raises InvalidInput without `per`.
    """
    import torch  # only here: a flow is traced, and planned, without it

    scores_BK = scores["scores"]
    if scores_BK.dim() != 2:  # noqa: PLR2004  rows, and what was made of each
        raise InvalidInput("scores of mean_scores", "a score for each row", "several: compute(..., per=ROWS)")
    return Computed({"scores": torch.nanmean(scores_BK, dim=1)})


@computation()
def compare_logprobs(rollout: Batch, recomputed: Batch, settings: Settings) -> Computed:
    """Measure how far the generation engine's log-probabilities are from the training engine's for equal weights."""
    mask_BT = response_mask(rollout)
    difference_BT = (recomputed["logprobs"] - rollout["logprobs"]) * mask_BT
    metrics = {"mean": float(masked_mean(difference_BT.abs(), mask_BT)), "max": float(difference_BT.abs().max())}
    return Computed(metrics=metrics)
