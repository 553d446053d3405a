"""Statistics of padded tensors, over positions that exist.

Shapes: B rows, T response tokens. A mask is 1.0 at a token, 0.0 at padding.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from prefect_rlhf.engines.rows import Batch

if TYPE_CHECKING:
    from torch import Tensor


def response_mask(rollout: Batch) -> Tensor:
    """Return [B, T]: the rows' `mask` if they have one, else 1.0 at every response token."""
    return own_tokens("logprobs", rollout)


def own_tokens(key: str, rows: Batch, *others: Batch | None) -> Tensor:
    """Return [B, T]: the `mask` of the first batch that has this key, else 1.0 at every token of `key` of `rows`.

    Other tokens of a row, such as an environment's between two turns of the model, have mask 0.0.
    """
    masks = (batch["mask"].float() for batch in (rows, *others) if batch is not None and "mask" in batch.columns)
    mask_BT = next(masks, None)
    return rows.mask(key) if mask_BT is None else mask_BT


def row_weights(rows: Batch, like_B: Tensor) -> Tensor:
    """Return [B]: the key `row_weights` of the rows if present, else 1.0 for each row."""
    return rows["row_weights"].float() if "row_weights" in rows.columns else like_B.new_ones(len(like_B))


def mean_of(values_B: Tensor) -> float:
    """Return the mean of the finite values; 0 without any."""
    left_B = values_B[values_B.isfinite()]
    return float(left_B.mean()) if len(left_B) else 0.0


def means(values_B: Mapping[str, Tensor]) -> dict[str, float]:
    """Return metrics: the mean of each tensor's finite values. A metric without values is left out: no score is not 0.

    >>> import torch
    >>> means({"score": torch.tensor([1.0, float("nan"), 2.0]), "cost": torch.tensor([float("nan")])})
    {'score': 1.5}
    """
    return {name: mean_of(each_B) for name, each_B in values_B.items() if each_B.isfinite().any()}


def unscored(scores_B: Tensor) -> float:
    """Return the share of rows without a score.

    >>> import torch
    >>> unscored(torch.tensor([1.0, float("nan")]))
    0.5
    """
    return 1 - float(scores_B.isfinite().float().mean())


def within(values_BT: Tensor, mask_BT: Tensor) -> Tensor:
    """Return the values at tokens of the mask, and 0 at all others, whatever they have there: 0 times infinity is NaN.

    >>> import torch
    >>> within(torch.tensor([2.0, float("inf")]), torch.tensor([1.0, 0.0]))
    tensor([2., 0.])
    """
    return values_BT.masked_fill(mask_BT == 0, 0.0) * mask_BT


def masked_mean(values_BT: Tensor, mask_BT: Tensor) -> Tensor:
    """Return the mean over all tokens of the mask; 0 if it has none."""
    return within(values_BT, mask_BT).sum() / mask_BT.sum().clamp(min=1)


def masked_variance(values_BT: Tensor, mask_BT: Tensor) -> Tensor:
    """Return the unbiased variance over all tokens; 0 with fewer than two."""
    deviation_BT = within(values_BT - masked_mean(values_BT, mask_BT), mask_BT)
    return deviation_BT.square().sum() / (mask_BT.sum() - 1).clamp(min=1)


def whiten(values_BT: Tensor, mask_BT: Tensor, eps: float = 1e-8) -> Tensor:
    """Shift and scale to mean 0 and variance 1 over all tokens of the mask; other positions become 0."""
    centred_BT = within(values_BT - masked_mean(values_BT, mask_BT), mask_BT)
    return centred_BT * (masked_variance(values_BT, mask_BT) + eps).rsqrt()


def row_sums(values_BT: Tensor, mask_BT: Tensor) -> Tensor:
    """Return [B]: each row's sum over its tokens of the mask."""
    return within(values_BT, mask_BT).sum(1)


def row_means(values_BT: Tensor, mask_BT: Tensor) -> Tensor:
    """Return [B]: each row's mean over its tokens of the mask; 0 if it has none."""
    return row_sums(values_BT, mask_BT) / mask_BT.sum(1).clamp(min=1)


def last_token(mask_BT: Tensor) -> Tensor:
    """Return [B, T]: 1.0 at each row's last token alone."""
    remaining_BT = mask_BT.flip(1).cumsum(1).flip(1)
    return mask_BT * (remaining_BT == 1).float()


def share_ahead(margins: Tensor) -> float:
    """Return the share of margins above 0; a margin of 0 counts half. The share of no margins is 0.

    >>> import torch
    >>> share_ahead(torch.tensor([2.0, 0.0, -1.0, 0.0]))
    0.5
    """
    return mean_of((margins > 0).float() + 0.5 * (margins == 0).float())
