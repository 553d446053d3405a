"""A loss's mean as a weight per row, known from the masks before the forward pass.

Shapes: B rows, T response tokens, P items of rows that belong together. The parts add up to the same weights for any
split of the rows into replicas, mini- and micro-batches, so each value always counts the same.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from prefect_rlhf.errors.errors import InvalidInput
from prefect_rlhf.placement.graph import MeanOver

UNITS = ("token", "row", "item")
"""The units of values; the weights of a mini-batch are in this order."""


@dataclass(frozen=True, slots=True)
class RowParts:
    """Each row's weight in a mean; made by `row_parts`."""

    kind: MeanOver
    mask_BT: Tensor  # 1.0 at tokens that are trained on
    token_B: Tensor  # of each of its tokens, in the loss
    metric_token_B: Tensor  # of each of its tokens, in a metric
    weight_B: Tensor  # in the weight that the sum over tokens is divided by
    row_B: Tensor  # of a value of the whole row, and in the weight of such values
    rows_per_item: int = 1

    @property
    def item_P(self) -> Tensor:
        """How much the value of a whole item counts."""
        return self.row_B.view(-1, self.rows_per_item).amax(1)

    def weights(self) -> Tensor:
        """Return [3], float64: the divisors of sums of token values, of row values and of item values."""
        return torch.stack([part.double().sum() for part in (self.weight_B, self.row_B, self.item_P)])

    def of(self, rows: Tensor | slice) -> RowParts:
        """Return the parts of these rows, which must be whole items."""
        return replace(
            self,
            mask_BT=self.mask_BT[rows],
            token_B=self.token_B[rows],
            metric_token_B=self.metric_token_B[rows],
            weight_B=self.weight_B[rows],
            row_B=self.row_B[rows],
        )

    def counted(self, output: Tensor) -> Tensor:
        """Return a model's output with 0 at tokens that are not trained on.

        The loss leaves these tokens out. But their KL, as at a tool's answer, may overflow, and in the gradient 0 times
        infinity would be NaN.
        """
        if output.shape[:2] != self.mask_BT.shape:
            return output
        is_left_out = self.mask_BT == 0
        return output.masked_fill(is_left_out.view(*is_left_out.shape, *[1] * (output.dim() - 2)), 0.0)

    def unit(self, values: Tensor, name: str) -> int:
        """Return the unit of the values as an index into UNITS. Raises InvalidInput for any other shape."""
        num_rows = len(self.row_B)
        if values.shape == self.mask_BT.shape:
            return 0
        if values.shape == (num_rows // self.rows_per_item,):
            return 2
        if values.shape == (num_rows,):
            return 1
        shapes = f"{list(self.mask_BT.shape)} or [{num_rows}]"
        expected = shapes if self.rows_per_item == 1 else f"{shapes} or [{num_rows // self.rows_per_item}]"
        raise InvalidInput(f"shape of {name}", list(values.shape), f"a value for each token, row or item: {expected}")

    def loss_sum(self, values: Tensor) -> tuple[int, Tensor]:
        """Return (unit, the sum of the loss's values times their parts). Raises InvalidInput."""
        unit = self.unit(values, "a loss's values")
        if unit and self.kind not in ("rows", "groups"):
            expected = 'mean_over="rows" or "groups" at .on(...): the loss has a value per row, not per token'
            raise InvalidInput("mean_over", self.kind, expected)
        return unit, self._sum(unit, values, self.token_B)

    def metric_sum(self, name: str, values: Tensor) -> tuple[int, Tensor]:
        """Return (unit, the sum of a metric's values times their parts). Raises InvalidInput."""
        unit = self.unit(values, f"metric {name}")
        return unit, self._sum(unit, values.detach(), self.metric_token_B)

    def _sum(self, unit: int, values: Tensor, token_B: Tensor) -> Tensor:
        """Return the sum of the values times their parts; a value without a part may be anything, such as 0/0."""
        parts = self.mask_BT * token_B[:, None] if unit == 0 else self.row_B if unit == 1 else self.item_P
        return (values.masked_fill(parts == 0, 0.0) * parts).sum()


def row_parts(kind: MeanOver, batch: Mapping[str, Tensor], rows_per_item: int = 1) -> RowParts:
    """Return the parts for the mean of `kind` over the tokens of `batch["mask"]`; a row without tokens has part 0.

    With l_it the loss of token t of row i, m_it its mask, n_i = sum over t of m_it:

    - "tokens": sum_it(m_it * l_it) / sum_i(n_i). Yu et al. 2025 (DAPO) as verl and TRL compute it.
    - "rows": mean over rows i of sum_t(m_it * l_it) / n_i. Shao et al. 2024, equation 3.
    - "groups": mean over groups g of sum_(i in g, t)(m_it * l_it) / sum_(i in g)(n_i). Yu et al. 2025, equation 8.
      Reads `group_tokens` [B], the denominator for the row's group, and `group_rows` [B], its rows with a token; a
      group that is split over mini-batches counts in each by the share of its rows there.
    - a number c: mean over rows i of sum_t(m_it * l_it) / c. Liu et al. 2025 (Dr. GRPO, arXiv:2503.20783), section 3.2,
      where c is the longest response allowed. Every token has the same weight, in a row of any length.

    Values of rows and of items (a chosen and a rejected answer) are means over rows or items, or over groups of them;
    an item counts if any of its rows does. Metrics are means of the same kind; for a number c they are means over rows.
    """
    mask_BT = batch["mask"]
    tokens_B = mask_BT.sum(1)
    row_B = (tokens_B > 0).to(mask_BT.dtype)
    each_B = row_B / tokens_B.clamp(min=1)
    if kind == "tokens":
        return RowParts(kind, mask_BT, row_B, row_B, tokens_B, row_B, rows_per_item)
    if kind == "rows":
        return RowParts(kind, mask_BT, each_B, each_B, row_B, row_B, rows_per_item)
    if kind == "groups":
        in_group_B = row_B / batch["group_tokens"].clamp(min=1)
        group_B = row_B / batch["group_rows"].clamp(min=1)
        return RowParts(kind, mask_BT, in_group_B, in_group_B, group_B, group_B, rows_per_item)
    return RowParts(kind, mask_BT, row_B / kind, each_B, row_B, row_B, rows_per_item)
