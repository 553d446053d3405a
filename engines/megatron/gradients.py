"""Weight gradients straight into their float32 buffers, without a tensor of the weight's size in between.

A buffer whose gradient always comes this way is not zeroed before a step but marked stale, and first written over.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

BLOCK_ELEMENTS = 1 << 18  # converted at a time: stays in a core's cache
BLOCK_ROWS = 64  # transposed at a time


class GradientSink:
    """Where the gradient of `weight` goes: its DDP buffer where it has one, else a tensor for autograd.

    Autograd takes `result` (None where the gradient is in the buffer already).
    """

    def __init__(self, weight: Tensor) -> None:
        buffer: Tensor | None = getattr(weight, "main_grad", None)
        self.result = torch.zeros_like(weight) if buffer is None else None
        self._target = buffer if self.result is None else self.result

    def add_all(self, parts: Iterable[Tensor]) -> None:
        """Add consecutive rows from the first on, part by part; what they do not reach has no gradient."""
        assert self._target is not None
        overwrite, start = take_stale(self._target), 0
        for part in parts:
            add_blockwise(self._target[start : start + part.shape[0]], part, overwrite)
            start += part.shape[0]
        if overwrite:
            self._target[start:].zero_()

    def add_at(self, rows_N: Tensor, gradient_NH: Tensor) -> None:
        """Add to rows in any order, which may repeat."""
        assert self._target is not None
        if take_stale(self._target):
            self._target.zero_()
        self._target.index_add_(0, rows_N, gradient_NH.to(self._target.dtype))


class WeightGradients:
    """Stands for Apex's CUDA module of this interface, through which Megatron's linear layers fill gradient buffers."""

    @staticmethod
    def wgrad_gemm_accum_fp32(inputs_NH: Tensor, above_NF: Tensor, main_grad_FH: Tensor) -> None:
        """Add above.T @ inputs to the buffer."""
        add_blockwise(main_grad_FH, transposed(above_NF) @ inputs_NH, take_stale(main_grad_FH))


def mark_stale(buffer: Tensor) -> None:
    """What `buffer` holds is of an earlier step; the next gradient replaces it."""
    buffer.is_stale = True  # type: ignore[attr-defined]


def take_stale(buffer: Tensor) -> bool:
    """Whether the buffer was stale; from now on it is not."""
    stale: bool = getattr(buffer, "is_stale", False)
    buffer.is_stale = False  # type: ignore[attr-defined]
    return stale


def add_blockwise(total: Tensor, part: Tensor, overwrite: bool = False) -> None:
    """`total += part` (or `total = part`) of another format; torch alone would convert the whole of `part` first."""
    if overwrite:
        total.copy_(part)
        return
    if total.is_cuda or total.dtype == part.dtype:
        total.add_(part)
        return
    blocks = (torch.split(flat, BLOCK_ELEMENTS) for flat in (total.view(-1), part.reshape(-1)))
    for total_block, part_block in zip(*blocks, strict=True):
        total_block.add_(part_block)


def transposed(x_NF: Tensor) -> Tensor:
    """A contiguous transpose. oneDNN's own, inside a product, is slower than the two apart."""
    y_FN = x_NF.new_empty(x_NF.shape[1], x_NF.shape[0])
    for source, target in zip(torch.split(x_NF, BLOCK_ROWS), torch.split(y_FN, BLOCK_ROWS, dim=1), strict=True):
        target.copy_(source.t())
    return y_FN
