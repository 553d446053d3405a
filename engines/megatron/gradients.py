"""Weight gradients straight into their float32 buffers, without a tensor of the weight's size in between."""

from __future__ import annotations

import torch
from torch import Tensor

BLOCK_ELEMENTS = 1 << 18  # converted at a time: stays in a core's cache


class GradientSink:
    """Where the gradient of `weight` goes: its DDP buffer where it has one, else a tensor for autograd.

    Autograd takes `result` (None where the gradient is in the buffer already).
    """

    def __init__(self, weight: Tensor) -> None:
        buffer: Tensor | None = getattr(weight, "main_grad", None)
        self.result = torch.zeros_like(weight) if buffer is None else None
        self._target = self.result if buffer is None else buffer

    def add_rows(self, start: int, gradient: Tensor) -> None:
        """Add to consecutive rows from `start` on."""
        assert self._target is not None
        add_blockwise(self._target[start : start + gradient.shape[0]], gradient)

    def add_at(self, rows_N: Tensor, gradient_NH: Tensor) -> None:
        """Add to rows in any order, which may repeat."""
        assert self._target is not None
        self._target.index_add_(0, rows_N, gradient_NH.to(self._target.dtype))


def add_blockwise(total: Tensor, part: Tensor) -> None:
    """`total += part` of another format; all at once, torch would convert the whole of `part` first."""
    if total.is_cuda or total.dtype == part.dtype:
        total.add_(part)
        return
    blocks = zip(total.view(-1).split(BLOCK_ELEMENTS), part.reshape(-1).split(BLOCK_ELEMENTS), strict=True)
    for total_block, part_block in blocks:
        total_block.add_(part_block)


class WeightGradients:
    """Stands for Apex's CUDA module of this interface, through which Megatron's linear layers fill gradient buffers."""

    @staticmethod
    def wgrad_gemm_accum_fp32(inputs_NH: Tensor, above_NF: Tensor, main_grad_FH: Tensor) -> None:
        """Add above.T @ inputs to the buffer."""
        add_blockwise(main_grad_FH, above_NF.t() @ inputs_NH)
