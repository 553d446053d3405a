"""Matrix products of bfloat16 on processors that multiply float32 faster: in float32, rounded to bfloat16 once.

Operands convert exactly and sums are in float32 either way, so the results are at least as accurate. An Intel Xeon
without its matrix unit (AMX) reached 148 GFLOP/s a core in float32, 75 by AVX512-BF16 and 28 by oneDNN's emulation.

Shapes: N tokens, K summed over, M columns; F outputs and H inputs of a weight.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import lru_cache, partial, update_wrapper
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.tensor_parallel import layers
from torch import Tensor

from prefect_rlhf.engines.megatron.gradients import add_blockwise, take_stale, transposed

FEWEST_TOKENS = 96  # fewer do not repay the conversion of a weight
AT_ONCE = 1024  # tokens, and columns of a result


@lru_cache(maxsize=1)
def is_float32_faster() -> bool:
    """Whether this processor multiplies float32 faster than bfloat16. Only x86 was measured."""
    found: Mapping[str, Any] = torch.cpu.get_capabilities()
    if found["architecture"] != "x86_64" or found["amx_bf16"]:
        return False
    return not (found["avx512_bf16"] and "AMD" in found["cpu_name"])


def product(left_NK: Tensor, right_KM: Tensor) -> Tensor:
    """Return left @ right in their format."""
    if not _widens(left_NK, left_NK.shape[0]):
        return left_NK @ right_KM
    made_NM = left_NK.new_empty(left_NK.shape[0], right_KM.shape[1])
    for right, columns in _zipped(right_KM, made_NM, 1):
        wide = right.float()
        for left, part in _zipped(left_NK, columns, 0):
            part.copy_(torch.mm(left.float(), wide))
    return made_NM


def weight_product(above_NF: Tensor, inputs_NH: Tensor) -> Tensor:
    """Return above.T @ inputs, the gradient of a weight [F, H], in float32 if it was computed in float32."""
    if not _widens(above_NF, above_NF.shape[0]):
        return transposed(above_NF) @ inputs_NH
    return torch.mm(above_NF.float().t(), inputs_NH.float())


def add_weight_product(total_FH: Tensor, above_NF: Tensor, inputs_NH: Tensor) -> None:
    """Add above.T @ inputs to a gradient buffer, or replace its content if it is stale."""
    overwrite = take_stale(total_FH)
    if not _widens(above_NF, above_NF.shape[0]):
        add_blockwise(total_FH, transposed(above_NF) @ inputs_NH, overwrite)
    elif overwrite:
        torch.mm(above_NF.float().t(), inputs_NH.float(), out=total_FH)
    else:
        total_FH.addmm_(above_NF.float().t(), inputs_NH.float())


def install() -> None:
    """Make Megatron's linear layers multiply by `product`; a no-op if bfloat16 is fast."""
    if is_float32_faster():
        for name in ("linear_with_frozen_weight", "linear_with_grad_accumulation_and_async_allreduce"):
            megatrons = getattr(layers, name)
            setattr(layers, name, update_wrapper(partial(_linear, megatrons), megatrons))  # it has attributes


def _zipped(operand: Tensor, made: Tensor, axis: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Cut both into the same blocks along an axis: this bounds how many elements are converted at once."""
    count = -(-made.shape[axis] // AT_ONCE)
    return zip(torch.chunk(operand, count, axis), torch.chunk(made, count, axis), strict=True)


def _widens(values: Tensor, num_tokens: int) -> bool:
    return values.dtype == torch.bfloat16 and not values.is_cuda and num_tokens >= FEWEST_TOKENS and is_float32_faster()


def _linear(
    megatrons: Callable[..., Tensor], input: Tensor, weight: Tensor, bias: Tensor | None = None, **options: Any
) -> Tensor:  # names as in Megatron's calls
    """Compute Megatron's linear layer; many tokens of bfloat16 in float32."""
    rows = input.reshape(-1, input.shape[-1])
    if not _widens(rows, len(rows)) or options.get("sequence_parallel"):
        return megatrons(input, weight, bias, **options)
    group = options["tp_group"] if options["allreduce_dgrad"] else None
    apply: Callable[..., Tensor] = _Linear.apply
    made = apply(rows, weight, group).view(*input.shape[:-1], -1)
    return made if bias is None else made + bias


class _Linear(torch.autograd.Function):
    """Megatron's linear layer without its bias. The gradient of a weight goes to its float32 buffer, if it has any."""

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
        if ctx.needs_input_grad[1] and hasattr(weight_FH, "main_grad"):
            add_weight_product(weight_FH.main_grad, above_NF, inputs_NH)
            weight_FH.grad_added_to_main_grad = True
        elif ctx.needs_input_grad[1]:
            grad_weight_FH = weight_product(above_NF, inputs_NH).to(weight_FH.dtype)
        if summed is not None:
            summed.wait()
        return grad_inputs_NH, grad_weight_FH, None
