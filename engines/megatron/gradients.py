"""Adds weight gradients directly to their float32 buffers, without a tensor of the weight's size in between.

If all gradients of a buffer arrive this way, it is not zeroed before a step. It is marked as stale, and the first write
replaces its content.
"""

from collections import deque
from collections.abc import Iterable

import torch
from torch import Tensor

CONVERTED_AT_ONCE = 1 << 18  # elements: they stay in a core's cache
TRANSPOSED_AT_ONCE = 64  # rows


class GradientSink:
    """Where a weight's gradient goes: its DDP buffer if it has one, or else a tensor for autograd.

    Autograd gets `result` (None if the gradient is in the buffer already). If the gradient is not `needed`, because the
    weight is frozen, it is discarded.
    """

    def __init__(self, weight: Tensor, needed: bool = True) -> None:
        buffer: Tensor | None = getattr(weight, "main_grad", None)
        self.result = torch.zeros_like(weight) if needed and buffer is None else None
        self._target = buffer if self.result is None else self.result

    def add_all(self, parts: Iterable[Tensor]) -> None:
        """Add consecutive rows part by part, beginning with the first row; later rows get no gradient."""
        if self._target is None:
            deque(parts, maxlen=0)  # they are made for what they add elsewhere
            return
        overwrite, start = take_stale(self._target), 0
        for part in parts:
            add_blockwise(self._target[start : start + part.shape[0]], part, overwrite)
            start += part.shape[0]
        if overwrite:
            self._target[start:].zero_()

    def add_at(self, rows_N: Tensor, gradient_NH: Tensor, held_N: Tensor | None = None) -> None:
        """Add to rows in any order, which may repeat; only to rows `held_N`, if given."""
        if self._target is None:
            return
        if take_stale(self._target):
            self._target.zero_()
        if held_N is not None and held_N.is_cuda:  # a selection's length would have to be waited for
            rows_N, gradient_NH = rows_N * held_N, gradient_NH * held_N[:, None]
        elif held_N is not None:
            rows_N, gradient_NH = rows_N[held_N], gradient_NH[held_N]
        self._target.index_add_(0, rows_N, gradient_NH.to(self._target.dtype))


def add_rows_of(weight_VH: Tensor, rows_N: Tensor, held_N: Tensor | None, total_NH: Tensor) -> None:
    """Add the weight's row `rows_N[n]` to `total_NH[n]`; only for `held_N`, if given."""
    if held_N is None:
        total_NH += weight_VH[rows_N]
    elif held_N.is_cuda:  # as in `add_at`
        total_NH += weight_VH[rows_N * held_N] * held_N[:, None]
    else:
        total_NH[held_N] += weight_VH[rows_N[held_N]]


def mark_stale(buffer: Tensor) -> None:
    """Mark that `buffer` holds gradients of an earlier step, which the next gradient replaces."""
    # Zeroing a buffer and then adding to it reads and writes it twice. A buffer whose gradient always arrives through a
    # GradientSink is marked instead, and the first gradient overwrites it: on CPU this saves a pass over all gradients
    # per step. The mark is an attribute of the tensor, so it needs no table that must be kept in step with DDP's
    # buffers.
    buffer.is_stale = True  # type: ignore[attr-defined]


def take_stale(buffer: Tensor) -> bool:
    """Return whether the buffer was stale, and clear the mark."""
    stale: bool = getattr(buffer, "is_stale", False)
    buffer.is_stale = False  # type: ignore[attr-defined]
    return stale


def add_blockwise(total: Tensor, part: Tensor, overwrite: bool = False) -> None:
    """Do `total += part` (or `total = part`) for a `part` of another format in blocks, as torch would convert it as a
    whole.
    """
    if overwrite:
        total.copy_(part)
        return
    if total.is_cuda or total.dtype == part.dtype:
        total.add_(part)
        return
    # torch converts the whole of `part` to float32 before the addition, through memory. Blocks that fit a core's cache
    # are converted there and added at once. CUDA fuses the conversion into its kernel, so only CPU takes this path.
    blocks = (torch.split(flat, CONVERTED_AT_ONCE) for flat in (total.view(-1), part.reshape(-1)))
    for total_block, part_block in zip(*blocks, strict=True):
        total_block.add_(part_block)


def transposed(x_NF: Tensor) -> Tensor:
    """Return a contiguous transpose. This plus a product is faster than oneDNN's product with its own transpose."""
    y_FN = x_NF.new_empty(x_NF.shape[1], x_NF.shape[0])
    for source, target in zip(
        torch.split(x_NF, TRANSPOSED_AT_ONCE), torch.split(y_FN, TRANSPOSED_AT_ONCE, dim=1), strict=True
    ):
        target.copy_(source.t())
    return y_FN
