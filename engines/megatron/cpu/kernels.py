"""Autograd functions for the CPU with as few passes over memory as torch's operators allow.

Shapes: S tokens of a row, B rows, N = S * B tokens, H hidden, F feed-forward, G key-value heads, Q query heads for each
of them, X = Q + 2 (queries, key, value), D head dimension.
"""

from collections.abc import Callable
from typing import Any, cast

import torch
from torch import Tensor

from prefect_rlhf.engines.cpu_products import is_in_float32
from prefect_rlhf.engines.megatron.rotary import rotate
from prefect_rlhf.placement.models.engine_constants import LONGEST_EXPLICIT

BLOCK_ROWS = 128  # tokens at a time, so that the output of a pass is still in cache for the next


def rms_norm(x: Tensor, weight_H: Tensor, eps: float) -> Tensor:
    """Return x / sqrt(mean(x^2) + eps) * weight over the last axis, statistics in float32."""
    apply: Callable[..., Tensor] = _RmsNorm.apply
    return apply(x, weight_H, eps)


def gated_silu(both: Tensor) -> Tensor:
    """Return silu(gate) * up of [..., 2F] with gate first."""
    apply: Callable[..., Tensor] = _Gated.apply
    return apply(both, True)


def gated_gelu(both: Tensor) -> Tensor:
    """Return gelu(gate) * up of [..., 2F] with gate first; gelu in its tanh approximation."""
    apply: Callable[..., Tensor] = _Gated.apply
    return apply(both, False)


def causal_attention(qkv_SBGXD: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate queries and keys by tables [S, D / 2], attend causally; return [S, B, G, Q, D]."""
    apply: Callable[..., Tensor] = _CausalAttention.apply
    return apply(qkv_SBGXD, cos, sin)


class _RmsNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight_H: Tensor, eps: float) -> Tensor:
        x_NH = x.reshape(-1, x.shape[-1])
        y_NH, inverse_N1 = torch.empty_like(x_NH), x_NH.new_empty((x_NH.shape[0], 1), dtype=torch.float32)
        for rows in _blocks(x_NH):
            wide = x_NH[rows].to(torch.float32, copy=True)
            mean = torch.linalg.vector_norm(wide, dim=-1, keepdim=True).square_().div_(wide.shape[-1])
            torch.rsqrt(mean.add_(eps), out=inverse_N1[rows])
            torch.mul(wide.mul_(inverse_N1[rows]), weight_H, out=y_NH[rows])
        ctx.save_for_backward(x_NH, weight_H, inverse_N1)
        return y_NH.view(x.shape)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        x_NH, weight_H, inverse_N1 = ctx.saved_tensors
        gradient = gradients[0]
        grad_NH, wide_weight_H = gradient.reshape(x_NH.shape), weight_H.float()
        grad_x_NH, grad_weight_H = torch.empty_like(x_NH), torch.zeros_like(wide_weight_H)
        is_trained = ctx.needs_input_grad[1]
        for rows in _blocks(x_NH):
            unit = x_NH[rows].to(torch.float32, copy=True).mul_(inverse_N1[rows])
            wide = grad_NH[rows].to(torch.float32, copy=True)
            shared = wide * unit
            if is_trained:
                grad_weight_H += shared.sum(0)
            along_N1 = torch.mv(shared, wide_weight_H)[:, None].div_(weight_H.shape[0])
            wide.mul_(wide_weight_H).addcmul_(unit, along_N1, value=-1)
            torch.mul(wide, inverse_N1[rows], out=grad_x_NH[rows])
        return grad_x_NH.view(gradient.shape), grad_weight_H.to(weight_H.dtype) if is_trained else None, None


class _Gated(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, both: Tensor, is_silu: bool) -> Tensor:
        both_NF = both.reshape(-1, both.shape[-1])
        half = both.shape[-1] // 2
        y_NF = both.new_empty(both_NF.shape[0], half)
        for rows in _blocks(both_NF):
            gate, up = both_NF[rows, :half], both_NF[rows, half:]
            if is_silu:
                torch.ops.aten.silu.out(gate, out=y_NF[rows]).mul_(up)
            else:
                torch.mul(torch.nn.functional.gelu(gate, approximate="tanh"), up, out=y_NF[rows])
        ctx.save_for_backward(both_NF)
        ctx.is_silu = is_silu
        return y_NF.view(*both.shape[:-1], half)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        (both_NF,) = ctx.saved_tensors
        half = both_NF.shape[-1] // 2
        gradient = gradients[0]
        grad_NF, grad_both_NF = gradient.reshape(-1, half), torch.empty_like(both_NF)
        for rows in _blocks(both_NF):
            gate, up, above = both_NF[rows, :half], both_NF[rows, half:], grad_NF[rows]
            if ctx.is_silu:
                scratch = torch.nn.functional.silu(gate)
                torch.mul(above, scratch, out=grad_both_NF[rows, half:])
                torch.mul(above, up, out=scratch)
                torch.ops.aten.silu_backward.grad_input(scratch, gate, grad_input=grad_both_NF[rows, :half])
            else:
                gate = gate.contiguous()
                torch.mul(above, torch.nn.functional.gelu(gate, approximate="tanh"), out=grad_both_NF[rows, half:])
                grad_both_NF[rows, :half] = torch.ops.aten.gelu_backward(above * up, gate, approximate="tanh")
        return grad_both_NF.view(*gradient.shape[:-1], 2 * half), None


class _CausalAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, qkv_SBGXD: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        length, num_rows, groups, width, dim = qkv_SBGXD.shape
        heads_BGXSD = qkv_SBGXD.new_empty(num_rows, groups, width, length, dim)
        heads_BGXSD.copy_(qkv_SBGXD.permute(1, 2, 3, 0, 4))
        rotate(heads_BGXSD[:, :, :-1], cos, sin)
        query, key, value = torch.split(heads_BGXSD.flatten(0, 1), [width - 2, 1, 1], dim=1)
        mixed, logsumexp = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(query, key, value, 0.0, True)
        ctx.save_for_backward(heads_BGXSD, cos, sin, mixed, logsumexp)
        by_token: Tensor = mixed.view(num_rows, groups, width - 2, length, dim).permute(3, 0, 1, 2, 4)
        return by_token.contiguous()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        heads_BGXSD, cos, sin, mixed, logsumexp = ctx.saved_tensors
        num_rows, groups, width, length, dim = heads_BGXSD.shape
        above = gradients[0].permute(1, 2, 3, 0, 4).reshape(-1, width - 2, length, dim)
        backward = _attention_backward if length <= LONGEST_EXPLICIT else _attention_backward_long
        query, key, value = torch.split(heads_BGXSD.flatten(0, 1), [width - 2, 1, 1], dim=1)
        parts = backward(above, query, key, value, mixed, logsumexp)
        grad_BGXSD = torch.cat([part.view(num_rows, groups, -1, length, dim) for part in parts], dim=2)
        rotate(grad_BGXSD[:, :, :-1], cos, -sin)
        return grad_BGXSD.permute(3, 0, 1, 2, 4).contiguous(), None, None


def _attention_backward(
    above: Tensor, query: Tensor, key: Tensor, value: Tensor, mixed: Tensor, logsumexp: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of causal attention from the S x S probabilities; the query heads of a group share a product.

    `above`, `query`, `mixed` are [BG, Q, S, D], `key` and `value` [BG, 1, S, D], `logsumexp` [BG, Q, S].
    """
    (batch, heads, length, dim), scale = query.shape, query.shape[-1] ** -0.5
    flat, dtype = (batch, heads * length, dim), query.dtype
    operands = query.reshape(flat), above.reshape(flat), key[:, 0], value[:, 0]
    wide = torch.float32 if is_in_float32(query, length) else dtype
    query, above, key, value = (each.to(wide) for each in operands)
    weights = torch.bmm(query, key.mT).float().mul_(scale).sub_(logsumexp.reshape(batch, -1, 1)).exp_()
    weights.view(batch, heads, length, length).tril_()
    grad_value = torch.bmm(weights.to(wide).mT, above)
    along = (above * mixed.reshape(flat)).sum(-1, keepdim=True, dtype=torch.float32)
    slopes = torch.bmm(above, value.mT).float().sub_(along).mul_(weights).mul_(scale).to(wide)
    made = torch.bmm(slopes, key), torch.bmm(slopes.mT, query), grad_value
    return made[0].to(dtype), made[1].to(dtype), made[2].to(dtype)


def _attention_backward_long(
    above: Tensor, query: Tensor, key: Tensor, value: Tensor, mixed: Tensor, logsumexp: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute the gradients of `_attention_backward` by torch's kernel, which keeps no S x S matrix."""
    kernel = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
    return cast(tuple[Tensor, Tensor, Tensor], kernel(above, query, key, value, mixed, logsumexp, 0.0, True))


def _blocks(x_NH: Tensor) -> list[slice]:
    return [slice(start, start + BLOCK_ROWS) for start in range(0, x_NH.shape[0], BLOCK_ROWS)]
