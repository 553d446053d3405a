"""Statistics of scores within groups of rows.

Groups may differ in size, and their rows need not be adjacent. A NaN does not count. Shapes: B rows, P groups.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from prefect_rlhf.tasks.rl.masked import means, unscored

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, slots=True)
class Groups:
    """The assignment of rows to groups; made by `groups_of`."""

    index_B: Tensor  # the place of a row's group among all groups
    num_groups: int

    def sums(self, values_B: Tensor) -> Tensor:
        """Return [P]: the sum over each group's rows."""
        return values_B.new_zeros(self.num_groups).index_add_(0, self.index_B, values_B)

    def totals(self, values_B: Tensor) -> Tensor:
        """Return [B]: at each row the sum over its group."""
        return self.sums(values_B)[self.index_B]


def groups_of(groups_B: Tensor) -> Groups:
    """Group rows that have equal numbers in `groups_B`.

    >>> import torch
    >>> groups_of(torch.tensor([7, 3, 7])).totals(torch.tensor([1.0, 2.0, 3.0]))
    tensor([4., 2., 4.])
    """
    numbers_P, index_B = groups_B.unique(return_inverse=True)  # type: ignore[no-untyped-call]  # in torch
    return Groups(index_B, len(numbers_P))


@dataclass(frozen=True, slots=True)
class GroupScores:
    """Scores relative to their group; made by `group_scores`."""

    groups: Groups
    count_P: Tensor  # rows with a score
    mean_P: Tensor  # 0 without a score
    deviation_P: Tensor  # standard deviation, unbiased; 0 for equal scores and for a single score
    centred_B: Tensor  # score less the group's mean; 0 for a row without a score, exactly 0 for equal scores

    @property
    def count_B(self) -> Tensor:
        return self.count_P[self.groups.index_B]

    @property
    def deviation_B(self) -> Tensor:
        return self.deviation_P[self.groups.index_B]


def group_scores(scores_B: Tensor, groups_B: Tensor) -> GroupScores:
    """Return score statistics for each group."""
    groups, left_B = groups_of(groups_B), ~scores_B.isnan()
    count_P = groups.sums(left_B.to(scores_B.dtype))
    mean_P = groups.sums(scores_B.nan_to_num(0.0)) / count_P.clamp(min=1)
    infinite_P = scores_B.new_full((groups.num_groups,), float("inf"))
    least_P = infinite_P.scatter_reduce(0, groups.index_B, scores_B.where(left_B, infinite_P[0]), "amin")
    most_P = (-infinite_P).scatter_reduce(0, groups.index_B, scores_B.where(left_B, -infinite_P[0]), "amax")
    differ_P = most_P > least_P  # not `deviation > 0`: rounding can make the deviation of equal scores positive
    centred_B = (scores_B - mean_P[groups.index_B]).where(left_B & differ_P[groups.index_B], scores_B.new_zeros(()))
    deviation_P = (groups.sums(centred_B.square()) / (count_P - 1).clamp(min=1)).sqrt()
    return GroupScores(groups, count_P, mean_P, deviation_P, centred_B)


def group_metrics(scores_B: Tensor, named: Mapping[str, Tensor], groups_B: Tensor) -> dict[str, float]:
    """Return metrics of a step's scores; means are over rows with a score, and over groups with such rows.

    `score_low` and `score_high` are the 95% interval of the mean score by bootstrap over the groups, unless a named
    reward has one of these names. `zero_deviation` is the share of groups whose scores are all equal. `unscored` is the
    share of rows without a score, and the only metric of a step without any score.
    """
    scores = group_scores(scores_B, groups_B)
    is_scored_P = scores.count_P > 0
    deviation_P = scores.deviation_P[is_scored_P]
    of_groups = {"group_deviation": deviation_P, "zero_deviation": (deviation_P == 0).float()}
    of_rows = {f"score_{name}": rewards_B for name, rewards_B in named.items()}
    found = means({"score": scores_B, **of_groups, **of_rows})
    return {"unscored": unscored(scores_B), **score_interval(scores.mean_P[is_scored_P]), **found}


def score_interval(means_P: Tensor) -> dict[str, float]:
    """Return `score_low` and `score_high`, the 95% interval of the mean of prompts' mean scores; empty without
    scores.
    """
    from prefect_rlhf.tasks.rl.evaluation.intervals import interval  # here: a flow is traced without numpy

    found = interval(means_P.double().cpu().numpy())
    return {} if found is None else {"score_low": found.low, "score_high": found.high}
