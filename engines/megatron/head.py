"""From the last hidden states to one number per token or row, without keeping logits.

Shapes: N tokens picked from a micro-batch, H hidden, V the vocabulary rows held by this tensor-parallel rank,
C vocabulary rows worked on at a time.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from prefect_rlhf.engines.megatron.gradients import GradientSink

LOGITS_AT_ONCE = 1 << 20  # elements: about what stays in a core's cache; a GPU takes more
LOGITS_AT_ONCE_CUDA = 1 << 28


def token_logprobs(
    hidden_NH: Tensor, weight_VH: Tensor, targets_N: Tensor, temperature: float, tp: dist.ProcessGroup
) -> Tensor:
    """Log-probability [N] (float32) of each target under softmax(hidden @ weight.T / temperature).

    The vocabulary is split over `tp`. Logits are made for a slice of the vocabulary at a time, and made again in the
    backward pass, so that at most LOGITS_AT_ONCE of them exist.
    """
    apply: Callable[..., Tensor] = _TokenLogprobs.apply
    return apply(hidden_NH, weight_VH, targets_N, 1 / temperature, tp)


def token_values(hidden_NH: Tensor, weight_1H: Tensor) -> Tensor:
    """Output [N] (float32) of a scalar head."""
    return torch.nn.functional.linear(hidden_NH, weight_1H).squeeze(-1).float()


class _TokenLogprobs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden_NH: Tensor, weight_VH: Tensor, targets_N: Tensor, scale: float, tp: dist.ProcessGroup
    ) -> Tensor:
        local_N = targets_N - tp.rank() * weight_VH.shape[0]
        top_N, sum_N, picked_N = _partial_softmax(hidden_NH, weight_VH, local_N, scale)
        logsumexp_N = _combine(top_N, sum_N, picked_N, tp)
        ctx.save_for_backward(hidden_NH, weight_VH, local_N, logsumexp_N)
        ctx.scale, ctx.tp = scale, tp
        return picked_N - logsumexp_N

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        hidden_NH, weight_VH, local_N, logsumexp_N = ctx.saved_tensors
        slope_N = gradients[0] * ctx.scale
        grad_hidden_NH = torch.zeros_like(hidden_NH, dtype=torch.float32)
        sink = GradientSink(weight_VH)
        for start, stop in _slices(hidden_NH, weight_VH):
            slice_CH = weight_VH[start:stop]
            logits_NC = (hidden_NH @ slice_CH.t()).float().mul_(ctx.scale)
            slopes_NC = logits_NC.sub_(logsumexp_N[:, None]).exp_().mul_(-slope_N[:, None])
            rows_M = ((local_N >= start) & (local_N < stop)).nonzero()[:, 0]
            slopes_NC[rows_M, local_N[rows_M] - start] += slope_N[rows_M]
            slopes_NC = slopes_NC.to(hidden_NH.dtype)
            grad_hidden_NH += slopes_NC @ slice_CH
            sink.add_rows(start, slopes_NC.t() @ hidden_NH)
        if ctx.tp.size() > 1:
            dist.all_reduce(grad_hidden_NH, group=ctx.tp)
        return grad_hidden_NH.to(hidden_NH.dtype), sink.result, None, None, None


def _partial_softmax(
    hidden_NH: Tensor, weight_VH: Tensor, local_N: Tensor, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Over this rank's vocabulary: the largest logit, the sum of exp(logit - largest), and the target's logit or 0."""
    top_N = hidden_NH.new_full(local_N.shape, -torch.inf, dtype=torch.float32)
    sum_N, picked_N = torch.zeros_like(top_N), torch.zeros_like(top_N)
    for start, stop in _slices(hidden_NH, weight_VH):
        logits_NC = (hidden_NH @ weight_VH[start:stop].t()).float().mul_(scale)
        rows_M = ((local_N >= start) & (local_N < stop)).nonzero()[:, 0]
        picked_N[rows_M] = logits_NC[rows_M, local_N[rows_M] - start]
        new_top_N = torch.maximum(top_N, logits_NC.amax(-1))
        sum_N.mul_((top_N - new_top_N).exp_()).add_(logits_NC.sub_(new_top_N[:, None]).exp_().sum(-1))
        top_N = new_top_N
    return top_N, sum_N, picked_N


def _combine(top_N: Tensor, sum_N: Tensor, picked_N: Tensor, tp: dist.ProcessGroup) -> Tensor:
    """Return logsumexp over the whole vocabulary; `picked_N` becomes the target's logit on every rank."""
    if tp.size() == 1:
        return sum_N.log_().add_(top_N)
    whole_top_N = top_N.clone()
    dist.all_reduce(whole_top_N, dist.ReduceOp.MAX, group=tp)
    both_2N = torch.stack((sum_N * (top_N - whole_top_N).exp(), picked_N))
    dist.all_reduce(both_2N, group=tp)
    picked_N.copy_(both_2N[1])
    return both_2N[0].log_().add_(whole_top_N)


def _slices(hidden_NH: Tensor, weight_VH: Tensor) -> list[tuple[int, int]]:
    """Vocabulary slices whose logits are few enough for all N tokens at once."""
    limit = LOGITS_AT_ONCE_CUDA if hidden_NH.is_cuda else LOGITS_AT_ONCE
    width = max(128, limit // max(1, hidden_NH.shape[0]) // 128 * 128)
    size = weight_VH.shape[0]
    return [(start, min(start + width, size)) for start in range(0, size, width)]
