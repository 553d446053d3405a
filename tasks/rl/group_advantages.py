"""Advantages without a critic (GRPO and its variants): a response's score relative to the scores of other responses.

`grpo_advantages` chooses among the formulas. Shapes: B rows, T response tokens, K named rewards, or K turns. Rows with
the same number in `groups_B` are responses to the same prompt. A score of NaN has advantage 0 and does not count in
means or deviations. The advantages of a group are also 0 if it has a single score or equal scores.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from prefect_rlhf.engines.compute import Computed
from prefect_rlhf.engines.rows import Batch
from prefect_rlhf.errors.errors import InvalidInput
from prefect_rlhf.tasks.rl.groups import group_metrics, group_scores, groups_of
from prefect_rlhf.tasks.rl.masked import masked_mean, masked_variance, response_mask, whiten
from prefect_rlhf.tasks.rl.score_shaping import (
    kl_penalties,
    named_rewards,
    overlong_penalty,
    response_lengths,
    truncated_rows,
    weighted_rewards,
)
from prefect_rlhf.tasks.rl.settings.online import GRPO
from prefect_rlhf.tasks.settings import Settings
from prefect_rlhf.tasks.tracing.operations import computation

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


def turn_advantages(rewards_BK: Tensor, turns_BT: Tensor, groups_B: Tensor) -> Tensor:
    """Return [B, T]: at each token of turn k, RLOO of R_k, the rewards summed from turn k on.

    A_ik = R_ik - 1/(G-1) * sum over j != i of R_jk, where R_jk is 0 if play j ended before turn k. `turns_BT` is each
    token's turn. The baseline does not depend on row i, so the estimate is unbiased. (To centre each turn's rewards
    over the rows that have the turn would be biased: that baseline depends on how many turns row i took.) A row whose
    reward is NaN does not count. With a single turn this is RLOO.

    >>> import torch
    >>> rewards, turns = torch.tensor([[0.0, 3.0], [1.0, 0.0]]), torch.tensor([[0, 1], [0, 0]])
    >>> turn_advantages(rewards, turns, torch.tensor([4, 4]))
    tensor([[ 2.,  3.],
            [-2., -2.]])
    """
    to_come_BK = rewards_BK.flip(1).cumsum(1).flip(1)
    advantages_BK = to_come_BK.new_zeros(to_come_BK.shape)
    for k in range(to_come_BK.shape[1]):
        advantages_BK[:, k] = rloo(to_come_BK[:, k], groups_B)
    return advantages_BK.gather(1, turns_BT)


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


@computation("keep")
def informative(rollout: Batch, scores: Batch, settings: Settings) -> Computed:
    """Keep the groups whose scores differ: in any other group all advantages are 0 (Yu et al. 2025, equation 11).

    A group is kept or dropped whole. Scores that are not finite do not count. Metrics are over all groups.
    """
    scores_B = scores["scores"].float()
    scores_B = scores_B.where(scores_B.isfinite(), float("nan"))
    metrics = group_metrics(scores_B, {}, rollout.groups)
    of_all = {name: value for name, value in metrics.items() if name in ("unscored", "zero_deviation")}
    return Computed({"keep": group_scores(scores_B, rollout.groups).deviation_B > 0}, of_all)


@computation("advantages", "row_weights", "group_tokens", "group_rows")
def grpo_advantages(
    rollout: Batch, scores: Batch, reference: Batch | None = None, recomputed: Batch | None = None, *, settings: GRPO
) -> Computed:
    """Compute `advantages` [B, T] from the scores, as the setting `advantage` says.

    Pass `reference`, the reference model's `logprobs`, if the reward has a KL penalty, and `recomputed`, the training
    engine's `logprobs`, to use these instead of generation's. The other outputs are [B]. `row_weights` is 0.0 for a row
    that the loss leaves out, because its score is not finite or because it was cut off and is masked; a masked row's
    score still counts in its group's mean, as in DAPO. `group_tokens` and `group_rows` say how many tokens and rows of
    the row's group are in the loss; means over groups need them.
    """
    mask_BT, lengths_B, limit = response_mask(rollout), response_lengths(rollout), settings.sampling.max_new_tokens
    scores_B = scores["scores"].float()
    scores_B = scores_B.where(scores_B.isfinite(), float("nan"))
    truncated_B = truncated_rows(rollout, limit)
    weights_B = (~scores_B.isnan()).float() * ((1 - truncated_B) if settings.overlong.mask else 1)
    trained_BT = mask_BT * weights_B[:, None]
    metrics = group_metrics(scores_B, named_rewards(scores), rollout.groups) | {
        "response_tokens": float(lengths_B.mean()),
        "truncated": float(truncated_B.mean()),
        "trained_tokens": float(trained_BT.sum()) * settings.update.epochs,
    }
    shaped_B = scores_B
    if settings.overlong.buffer is not None:
        lost_B = settings.overlong.penalty * overlong_penalty(lengths_B, limit, settings.overlong.buffer)
        shaped_B, metrics = shaped_B + lost_B, metrics | {"overlong_penalty": float(lost_B.mean())}
    penalties_BT = kl_penalties(rollout if recomputed is None else recomputed, reference, mask_BT, settings.kl)
    if penalties_BT is not None:
        metrics |= {"kl": float(penalties_BT.sum(1).mean()) / settings.kl.coefficient}
    if settings.advantage == "turns":
        advantages_BT = _of_turns(shaped_B, penalties_BT, rollout, settings)
    else:
        advantages_BT = _advantages(shaped_B, penalties_BT, scores, rollout.groups, trained_BT, settings)
    groups, tokens_B = groups_of(rollout.groups), trained_BT.sum(1)
    advantages_BT = advantages_BT * trained_BT
    metrics |= {"zero_advantage": float((advantages_BT == 0).all(1).float().mean())}
    columns = {
        "advantages": advantages_BT,
        "row_weights": weights_B,
        "group_tokens": groups.totals(tokens_B),
        "group_rows": groups.totals((tokens_B > 0).float()),
    }
    return Computed(columns, metrics)


def _advantages(
    shaped_B: Tensor, penalties_BT: Tensor | None, scores: Batch, groups_B: Tensor, trained_BT: Tensor, settings: GRPO
) -> Tensor:
    """Return [B, T], or [B, 1] if the advantages are equal at all tokens.

    Except for REINFORCE++, the KL penalties of a response's tokens are summed and subtracted from its score.
    """
    if settings.advantage == "gdpo":
        rewards_KB, weights = weighted_rewards(named_rewards(scores), settings)
        rewards_KB = rewards_KB.masked_fill(shaped_B.isnan(), float("nan"))
        return gdpo(rewards_KB, weights, groups_B)[:, None]
    if settings.advantage == "reinforce_plus_plus":
        lost_BT = trained_BT.new_zeros(trained_BT.shape) if penalties_BT is None else penalties_BT
        return reinforce_plus_plus(shaped_B, lost_BT, trained_BT)
    if penalties_BT is not None:
        shaped_B = shaped_B - penalties_BT.sum(1)
    if settings.advantage == "reinforce_plus_plus_baseline":
        return reinforce_plus_plus_baseline(shaped_B, groups_B, trained_BT)
    by_row = {"grpo": grpo, "dr_grpo": dr_grpo, "rloo": rloo}
    return by_row[settings.advantage](shaped_B, groups_B)[:, None]


def _of_turns(shaped_B: Tensor, penalties_BT: Tensor | None, rollout: Batch, settings: GRPO) -> Tensor:
    """Return [B, T]: the advantages of turns; a turn's reward is reduced by the KL penalties of its tokens.

    Raises InvalidInput for rows without turns.
    """
    if "turn_rewards" not in rollout:
        right = "another advantage, such as rloo: only a play returns rewards per turn"
        raise InvalidInput("algo.advantage", settings.advantage, right)
    turns_BT = rollout["turn"].long()
    rewards_BK = rollout["turn_rewards"].float()
    if penalties_BT is not None:
        rewards_BK = rewards_BK.scatter_add(1, turns_BT, -penalties_BT)
    return turn_advantages(rewards_BK.masked_fill(shaped_B.isnan()[:, None], float("nan")), turns_BT, rollout.groups)
