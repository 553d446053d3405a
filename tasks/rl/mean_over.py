"""What a policy's loss is a mean over: tokens, rows, groups, or rows with a constant in place of their length.

Shapes: B rows, T response tokens. However rows are split into replicas, mini- and micro-batches, sums add up.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from prefect_rlhf.engines.engine import LossTerms
from prefect_rlhf.tasks.rl.policy_settings import MeanOver

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, slots=True)
class Mean:
    """A mean, as what each row contributes to its sums; made by `mean_over`."""

    mask_BT: Tensor  # 1.0 at tokens that are trained
    token_B: Tensor  # a token's part in the loss
    metric_token_B: Tensor  # a token's part in a metric
    row_B: Tensor  # the row's part in the weight

    def terms(self, losses_BT: Tensor, **metrics_BT: Tensor) -> LossTerms:
        """Return the loss with metrics that are means of the same kind (over rows, where a constant divides)."""
        masked_BT = self.mask_BT * self.metric_token_B[:, None]
        metrics = {name: (values_BT.detach() * masked_BT).sum() for name, values_BT in metrics_BT.items()}
        total = (losses_BT * self.mask_BT * self.token_B[:, None]).sum()
        return LossTerms(total, self.row_B.sum(), metrics)


def mean_over(kind: MeanOver, mask_BT: Tensor, batch: Mapping[str, Tensor]) -> Mean:
    """Return the mean of `kind` over the tokens of `mask_BT`; a row without any counts nowhere.

    With l_it the loss of token t of row i, m_it its mask, n_i = sum over t of m_it:

    - "tokens": sum_it(m_it * l_it) / sum_i(n_i). Yu et al. 2025 (DAPO) as verl and TRL compute it.
    - "rows": mean over rows i of sum_t(m_it * l_it) / n_i. Shao et al. 2024, equation 3.
    - "groups": mean over groups g of sum_(i in g, t)(m_it * l_it) / sum_(i in g)(n_i). Yu et al. 2025, equation 8.
      Reads `group_tokens` [B], the denominator for the row's group, and `group_rows` [B], its rows with a token; a
      group that is split over mini-batches counts in each by the share of its rows there.
    - a number c: mean over rows i of sum_t(m_it * l_it) / c. Liu et al. 2025 (Dr. GRPO, arXiv:2503.20783), section 3.2,
      where c is the longest response allowed. Every token counts alike, however many others there are.
    """
    tokens_B = mask_BT.sum(1)
    row_B = (tokens_B > 0).to(mask_BT.dtype)
    each_B = row_B / tokens_B.clamp(min=1)
    if kind == "tokens":
        return Mean(mask_BT, row_B, row_B, tokens_B)
    if kind == "rows":
        return Mean(mask_BT, each_B, each_B, row_B)
    if kind == "groups":
        in_group_B = row_B / batch["group_tokens"].clamp(min=1)
        return Mean(mask_BT, in_group_B, in_group_B, row_B / batch["group_rows"].clamp(min=1))
    return Mean(mask_BT, row_B / kind, each_B, row_B)


def trained_mask(batch: Mapping[str, Tensor]) -> Tensor:
    """Return [B, T]: `mask`, but 0.0 in rows of which `row_weights` [B], where there are any, says 0."""
    mask_BT = batch["mask"]
    return mask_BT * batch["row_weights"].to(mask_BT.dtype)[:, None] if "row_weights" in batch else mask_BT
