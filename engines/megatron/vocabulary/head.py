"""Turns the last hidden states into a number per token or row, without keeping logits.

Shapes: N tokens picked from a micro-batch, H hidden, V the vocabulary rows held by this tensor-parallel rank (padding
included), C vocabulary rows worked on at a time.
"""

from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from prefect_rlhf.engines.cpu_products import product
from prefect_rlhf.engines.megatron.cpu.products import weight_product
from prefect_rlhf.engines.megatron.gradients import GradientSink, add_rows_of
from prefect_rlhf.placement.models.engine_constants import LOGITS_AT_ONCE_CPU, LOGITS_AT_ONCE_CUDA


def token_logprobs(
    hidden_NH: Tensor,
    weight_VH: Tensor,
    targets_N: Tensor,
    temperature: float,
    tp: dist.ProcessGroup,
    num_rows: int | None = None,
) -> Tensor:
    """Compute the log-probability [N] (float32) of each target under softmax(hidden @ weight.T / temperature).

    The vocabulary is split over `tp`; of this rank's rows the first `num_rows` (all, unless given) are tokens, and the
    rest have no part in the softmax. Logits are computed for a slice of the vocabulary at a time, and again in the
    backward pass, so that at most LOGITS_AT_ONCE_CPU or LOGITS_AT_ONCE_CUDA of them exist.
    """
    apply: Callable[..., Tensor] = _TokenLogprobs.apply
    tokens = weight_VH.shape[0] if num_rows is None else num_rows
    return apply(hidden_NH, weight_VH, targets_N, 1 / temperature, tp, tokens)


def token_values(hidden_NH: Tensor, weight_1H: Tensor) -> Tensor:
    """Compute the output [N] (float32) of a scalar head."""
    return torch.nn.functional.linear(hidden_NH, weight_1H).squeeze(-1).float()


class _TokenLogprobs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden_NH: Tensor,
        weight_VH: Tensor,
        targets_N: Tensor,
        scale: float,
        tp: dist.ProcessGroup,
        num_rows: int,
    ) -> Tensor:
        local_N = targets_N - tp.rank() * weight_VH.shape[0]
        logsumexp_N, picked_N = _partial_logsumexp(hidden_NH, weight_VH[:num_rows], local_N, scale)
        logsumexp_N = _combine(logsumexp_N, picked_N, tp)
        ctx.save_for_backward(hidden_NH, weight_VH, local_N, logsumexp_N)
        ctx.scale, ctx.tp, ctx.num_rows = scale, tp, num_rows
        return picked_N - logsumexp_N

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        """Apply d logprob / d logits = (1 at the target - softmax) * scale; the few hidden states take the slopes."""
        hidden_NH, weight_VH, local_N, logsumexp_N = ctx.saved_tensors
        slope_N1 = (gradients[0] * ctx.scale)[:, None]
        sloped_NH = (hidden_NH * slope_N1).to(hidden_NH.dtype)
        mixed_NH = torch.zeros_like(hidden_NH, dtype=torch.float32)  # softmax @ weight
        sink = GradientSink(weight_VH, ctx.needs_input_grad[1])
        sink.add_all(_weight_gradients(ctx, mixed_NH, -sloped_NH))
        held_N = None if ctx.tp.size() == 1 else (local_N >= 0) & (local_N < ctx.num_rows)
        sink.add_at(local_N, sloped_NH, held_N)
        grad_hidden_NH = mixed_NH.neg_()
        add_rows_of(weight_VH, local_N, held_N, grad_hidden_NH)
        grad_hidden_NH *= slope_N1
        if ctx.tp.size() > 1:
            dist.all_reduce(grad_hidden_NH, group=ctx.tp)
        return grad_hidden_NH.to(hidden_NH.dtype), sink.result, None, None, None, None


def _weight_gradients(ctx: Any, mixed_NH: Tensor, above_NH: Tensor) -> Iterator[Tensor]:
    """Yield softmax.T @ above for each slice of the vocabulary [C, H]; add softmax @ weight to `mixed_NH`.

    A frozen weight needs the latter alone, and no gradient is yielded.
    """
    hidden_NH, weight_VH, _, logsumexp_N = ctx.saved_tensors
    for start, stop in slices(hidden_NH, weight_VH[: ctx.num_rows]):
        slice_CH = weight_VH[start:stop]
        softmax_NC = logits_of(hidden_NH, slice_CH, ctx.scale).sub_(logsumexp_N[:, None]).exp_().to(hidden_NH.dtype)
        mixed_NH += product(softmax_NC, slice_CH)
        if ctx.needs_input_grad[1]:
            yield weight_product(softmax_NC, above_NH)


def logits_of(hidden_NH: Tensor, slice_CH: Tensor, scale: float) -> Tensor:
    """Compute logits [N, C] in float32, in separate memory."""
    logits_NC = product(hidden_NH, slice_CH.t()).float()
    return logits_NC if scale == 1 else logits_NC.mul_(scale)


def _partial_logsumexp(hidden_NH: Tensor, weight_VH: Tensor, local_N: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """Compute over this rank's vocabulary the logsumexp of the logits, and the target's logit or 0."""
    picked_N = torch.zeros(local_N.shape, dtype=torch.float32, device=hidden_NH.device)
    parts = []
    for start, stop in slices(hidden_NH, weight_VH):
        logits_NC = logits_of(hidden_NH, weight_VH[start:stop], scale)
        inside_N = (local_N >= start) & (local_N < stop)  # no list of them: its length would have to be waited for
        target_N = logits_NC.gather(1, ((local_N - start) * inside_N)[:, None])[:, 0]
        picked_N = torch.where(inside_N, target_N, picked_N)
        parts.append(logits_NC[:, 0] - logits_NC.log_softmax(-1)[:, 0])  # a single fused pass, unlike logsumexp
    nothing_N = torch.full_like(picked_N, float("-inf"))  # from a rank whose rows are all padding
    return torch.stack(parts or [nothing_N]).logsumexp(0), picked_N


def _combine(logsumexp_N: Tensor, picked_N: Tensor, tp: dist.ProcessGroup) -> Tensor:
    """Return logsumexp over the whole vocabulary; `picked_N` becomes the target's logit on every rank."""
    if tp.size() == 1:
        return logsumexp_N
    top_N = logsumexp_N.clone()
    dist.all_reduce(top_N, dist.ReduceOp.MAX, group=tp)
    both_2N = torch.stack(((logsumexp_N - top_N).exp(), picked_N))
    dist.all_reduce(both_2N, group=tp)
    picked_N.copy_(both_2N[1])
    return both_2N[0].log_().add_(top_N)


def slices(hidden_NH: Tensor, weight_VH: Tensor) -> list[tuple[int, int]]:
    """Cut the vocabulary into slices small enough to compute the logits of all N tokens at once."""
    limit = LOGITS_AT_ONCE_CUDA if hidden_NH.is_cuda else LOGITS_AT_ONCE_CPU
    width = max(128, limit // max(1, hidden_NH.shape[0]) // 128 * 128)
    size = weight_VH.shape[0]
    return [(start, min(start + width, size)) for start in range(0, size, width)]
