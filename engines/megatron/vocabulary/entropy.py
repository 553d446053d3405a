"""The entropy of each token's distribution, without keeping logits.

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
from prefect_rlhf.engines.megatron.gradients import GradientSink
from prefect_rlhf.engines.megatron.vocabulary.head import logits_of, slices


def token_entropy(
    hidden_NH: Tensor, weight_VH: Tensor, temperature: float, tp: dist.ProcessGroup, num_rows: int
) -> Tensor:
    """Compute the entropy [N] (float32, nats) of softmax(hidden @ weight.T / temperature).

    The vocabulary is split over `tp`; of this rank's rows the first `num_rows` are tokens. As in `token_logprobs`,
    logits are computed for a slice of the vocabulary at a time.
    """
    apply: Callable[..., Tensor] = _TokenEntropy.apply
    return apply(hidden_NH, weight_VH, 1 / temperature, tp, num_rows)


class _TokenEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden_NH: Tensor, weight_VH: Tensor, scale: float, tp: dist.ProcessGroup, num_rows: int
    ) -> Tensor:
        logsumexp_N, mean_N = _whole(*_partial(hidden_NH, weight_VH[:num_rows], scale), tp)
        ctx.save_for_backward(hidden_NH, weight_VH, logsumexp_N, mean_N)
        ctx.scale, ctx.tp, ctx.num_rows = scale, tp, num_rows
        return logsumexp_N - mean_N

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        """Apply d entropy / d logit = -softmax * (scaled logit - its mean) * scale."""
        hidden_NH, weight_VH, *_ = ctx.saved_tensors
        grad_hidden_NH = torch.zeros_like(hidden_NH, dtype=torch.float32)
        sink = GradientSink(weight_VH, ctx.needs_input_grad[1])
        sink.add_all(_weight_gradients(ctx, gradients[0] * -ctx.scale, grad_hidden_NH))
        if ctx.tp.size() > 1:
            dist.all_reduce(grad_hidden_NH, group=ctx.tp)
        return grad_hidden_NH.to(hidden_NH.dtype), sink.result, None, None, None


def _weight_gradients(ctx: Any, slope_N: Tensor, grad_hidden_NH: Tensor) -> Iterator[Tensor]:
    """Yield the weight's gradient, unless it is frozen, for each slice of the vocabulary [C, H]; add the hidden states'
    gradient to its tensor."""
    hidden_NH, weight_VH, logsumexp_N, mean_N = ctx.saved_tensors
    for start, stop in slices(hidden_NH, weight_VH[: ctx.num_rows]):
        slice_CH = weight_VH[start:stop]
        logits_NC = logits_of(hidden_NH, slice_CH, ctx.scale)
        softmax_NC = (logits_NC - logsumexp_N[:, None]).exp_()
        change_NC = logits_NC.sub_(mean_N[:, None]).mul_(softmax_NC).mul_(slope_N[:, None]).to(hidden_NH.dtype)
        grad_hidden_NH += product(change_NC, slice_CH)
        if ctx.needs_input_grad[1]:
            yield weight_product(change_NC, hidden_NH)


def _partial(hidden_NH: Tensor, weight_VH: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """Compute logsumexp and mean of the logits over this rank's vocabulary; -inf and 0 for an empty part."""
    nothing_N = torch.zeros(hidden_NH.shape[0], dtype=torch.float32, device=hidden_NH.device)
    sums, means = [nothing_N - float("inf")], [nothing_N]
    for start, stop in slices(hidden_NH, weight_VH):
        logits_NC = logits_of(hidden_NH, weight_VH[start:stop], scale)
        sums.append(logits_NC.logsumexp(-1))
        means.append(logits_NC.softmax(-1).mul_(logits_NC).sum(-1))
    sums_KN, logsumexp_N = torch.stack(sums), torch.stack(sums).logsumexp(0)
    shares_KN = (sums_KN - logsumexp_N).exp().nan_to_num()  # of a rank without any: 0
    return logsumexp_N, (shares_KN * torch.stack(means)).sum(0)


def _whole(logsumexp_N: Tensor, mean_N: Tensor, tp: dist.ProcessGroup) -> tuple[Tensor, Tensor]:
    """Return logsumexp and mean over the whole vocabulary."""
    if tp.size() == 1:
        return logsumexp_N, mean_N
    top_N = logsumexp_N.clone()
    dist.all_reduce(top_N, dist.ReduceOp.MAX, group=tp)
    share_N = (logsumexp_N - top_N).exp()
    both_2N = torch.stack((share_N, share_N * mean_N))
    dist.all_reduce(both_2N, group=tp)
    return both_2N[0].log().add_(top_N), both_2N[1] / both_2N[0]
