"""The token embedding, with its vocabulary split over tensor-parallel ranks.

Shapes: B rows of S tokens, N = S * B, H hidden, V vocabulary rows of this rank.
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from prefect_rlhf.engines.megatron.gradients import GradientSink


def embed(tokens_BS: Tensor, weight_VH: Tensor, tp: dist.ProcessGroup) -> Tensor:
    """Look up rows of the weight as [S, B, H]. A rank adds zeros for tokens of other ranks."""
    local_SB = tokens_BS.t().contiguous() - tp.rank() * weight_VH.shape[0]
    apply: Callable[..., Tensor] = _Embed.apply
    return apply(local_SB.flatten(), weight_VH, tp).view(*local_SB.shape, -1)


class _Embed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, local_N: Tensor, weight_VH: Tensor, tp: dist.ProcessGroup) -> Tensor:
        held_N = None if tp.size() == 1 else (local_N >= 0) & (local_N < weight_VH.shape[0])
        ctx.save_for_backward(local_N, held_N, weight_VH)
        if held_N is None:
            return weight_VH.index_select(0, local_N)
        picked_NH = weight_VH.index_select(0, local_N * held_N)
        picked_NH.mul_(held_N[:, None])
        dist.all_reduce(picked_NH, group=tp)
        return picked_NH

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        local_N, held_N, weight_VH = ctx.saved_tensors
        sink = GradientSink(weight_VH)
        sink.add_at(local_N, gradients[0], held_N)
        return None, sink.result, None
