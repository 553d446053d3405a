"""Megatron's linear layers and their gradients on processors that multiply float32 faster than bfloat16.

Shapes: N tokens; F outputs and H inputs of a weight.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial, update_wrapper
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.tensor_parallel import layers
from torch import Tensor

from prefect_rlhf.engines.cpu_products import AT_ONCE, fewest_tokens, is_in_float32, product
from prefect_rlhf.engines.megatron.gradients import add_blockwise, take_stale, transposed


def weight_product(above_NF: Tensor, inputs_NH: Tensor) -> Tensor:
    """Return above.T @ inputs, the gradient of a weight [F, H], in float32 if it was computed in float32."""
    if not is_in_float32(above_NF, above_NF.shape[0]):
        return transposed(above_NF) @ inputs_NH
    return torch.mm(above_NF.float().t(), inputs_NH.float())


def add_weight_product(total_FH: Tensor, above_NF: Tensor, inputs_NH: Tensor) -> None:
    """Add above.T @ inputs to a gradient buffer, or replace its content if it is stale."""
    overwrite = take_stale(total_FH)
    if not is_in_float32(above_NF, above_NF.shape[0]):
        add_blockwise(total_FH, transposed(above_NF) @ inputs_NH, overwrite)
        return
    for above, inputs in zip(torch.split(above_NF, AT_ONCE), torch.split(inputs_NH, AT_ONCE), strict=True):
        total_FH.addmm_(above.float().t(), inputs.float(), beta=0 if overwrite else 1)
        overwrite = False


def install() -> None:
    """Make Megatron's linear layers multiply by `product`; a no-op if bfloat16 is fast."""
    if fewest_tokens() is not None:
        for name in ("linear_with_frozen_weight", "linear_with_grad_accumulation_and_async_allreduce"):
            megatrons = getattr(layers, name)
            setattr(layers, name, update_wrapper(partial(_linear, megatrons), megatrons))  # it has attributes


def _linear(
    megatrons: Callable[..., Tensor], input: Tensor, weight: Tensor, bias: Tensor | None = None, **options: Any
) -> Tensor:  # names as in Megatron's calls
    """Compute Megatron's linear layer; many tokens of bfloat16 in float32."""
    if not is_in_float32(input, input.shape[:-1].numel()) or options.get("sequence_parallel"):
        return megatrons(input, weight, bias, **options)
    made = _applied(input, weight, options["tp_group"] if options["allreduce_dgrad"] else None)
    return made if bias is None else made + bias


def linear(input: Tensor, weight: Tensor) -> Tensor:
    """Return input @ weight.T, like torch's function of this name; bfloat16 in float32 where that is faster."""
    if not is_in_float32(input, input.shape[:-1].numel()):
        return torch.nn.functional.linear(input, weight)
    return _applied(input, weight, None)


def _applied(input: Tensor, weight: Tensor, group: dist.ProcessGroup | None) -> Tensor:
    apply: Callable[..., Tensor] = _Linear.apply
    return apply(input.reshape(-1, input.shape[-1]), weight, group).view(*input.shape[:-1], -1)


class _Linear(torch.autograd.Function):
    """Megatron's linear layer without its bias. A weight's gradient goes to its float32 buffer, if there is one.

    An adapter's gradient is returned, and autograd adds it to the buffer.
    """

    @staticmethod
    def forward(ctx: Any, inputs_NH: Tensor, weight_FH: Tensor, group: dist.ProcessGroup | None) -> Tensor:
        ctx.save_for_backward(inputs_NH if ctx.needs_input_grad[1] else None, weight_FH)  # a frozen weight needs none
        ctx.group = group
        return product(inputs_NH, weight_FH.t())

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        inputs_NH, weight_FH = ctx.saved_tensors
        (above_NF,) = gradients
        grad_inputs_NH = product(above_NF, weight_FH)
        summed = None if ctx.group is None else dist.all_reduce(grad_inputs_NH, group=ctx.group, async_op=True)
        grad_weight_FH = None
        is_buffered = hasattr(weight_FH, "main_grad") and not getattr(weight_FH, "is_adapter", False)
        if ctx.needs_input_grad[1] and is_buffered:
            add_weight_product(weight_FH.main_grad, above_NF, inputs_NH)
            weight_FH.grad_added_to_main_grad = True
        elif ctx.needs_input_grad[1]:
            grad_weight_FH = weight_product(above_NF, inputs_NH).to(weight_FH.dtype)
        if summed is not None:
            summed.wait()
        return grad_inputs_NH, grad_weight_FH, None
