"""Products of bfloat16 on processors that multiply float32 faster: in float32, rounded to bfloat16 once.

Operands convert exactly and sums are in float32 either way, so the results are at least as accurate. An Intel Xeon
without its matrix unit (AMX) reached 148 GFLOP/s a core in float32, 75 by AVX512-BF16 and 28 by oneDNN's emulation. An
AMD EPYC without AVX-512, where oneDNN has no bfloat16, reached 55 in float32 and 8 by torch's own loops (2026-11-28).

Shapes: N tokens, K summed over, M columns.
"""

from collections.abc import Callable, Iterator, Mapping
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

AT_ONCE = 1024  # tokens, and columns of a result


@lru_cache(maxsize=1)
def has_bfloat16() -> bool:
    """Whether oneDNN multiplies bfloat16 on this processor. x86 needs AVX-512 or AVX-NE-CONVERT for that."""
    found = _capabilities()
    return found["architecture"] != "x86_64" or any(found.get(name) for name in ("avx512_bw", "avx_ne_convert"))


@lru_cache(maxsize=1)
def fewest_tokens() -> int | None:
    """From how many tokens on a product in float32 is faster here, conversions included; None if it never is.

    Only x86 was measured.
    """
    found = _capabilities()
    if found["architecture"] != "x86_64" or found["amx_bf16"]:
        return None
    if not has_bfloat16():
        return 4
    return None if found["avx512_bf16"] and "AMD" in found["cpu_name"] else 96


def is_in_float32(values: Tensor, num_tokens: int) -> bool:
    """Whether products of these values, so many at a time, are computed in float32."""
    if values.dtype != torch.bfloat16 or values.is_cuda:
        return False
    fewest = fewest_tokens()
    return fewest is not None and num_tokens >= fewest


def product(left_NK: Tensor, right_KM: Tensor) -> Tensor:
    """Return left @ right in their format.

    A block of the right operand converts at a time, so that it stays in the processor's caches. One EPYC core
    multiplied 16 tokens by SmolLM2's head [576, 49152] in 33 ms, by a kept copy in float32 in 27 to 43 ms, and in 99 ms
    without any conversion (2026-11-28).
    """
    if not is_in_float32(left_NK, left_NK.shape[0]):
        return left_NK @ right_KM
    made_NM = left_NK.new_empty(left_NK.shape[0], right_KM.shape[1])
    for right, columns in _zipped(right_KM, made_NM, 1):
        wide = right.float()
        for left, part in _zipped(left_NK, columns, 0):
            part.copy_(torch.mm(left.float(), wide))
    return made_NM


def added_product(total_NM: Tensor, left_NK: Tensor, right_KM: Tensor, scale: float) -> Tensor:
    """Return total + scale * left @ right in their format, rounded once. Autograd keeps left and right as they are."""
    if not is_in_float32(left_NK, left_NK.shape[0]):
        return torch.addmm(total_NM, left_NK, right_KM, alpha=scale)
    apply: Callable[..., Tensor] = _AddedProduct.apply
    return apply(total_NM, left_NK, right_KM, scale)


class _AddedProduct(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, total_NM: Tensor, left_NK: Tensor, right_KM: Tensor, scale: float) -> Tensor:
        ctx.save_for_backward(left_NK, right_KM)
        ctx.scale = scale
        return torch.addmm(total_NM.float(), left_NK.float(), right_KM.float(), alpha=scale).to(total_NM.dtype)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        left_NK, right_KM = ctx.saved_tensors
        above_NM = gradients[0].float()
        grad_left_NK = ctx.scale * (above_NM @ right_KM.float().t())
        grad_right_KM = ctx.scale * (left_NK.float().t() @ above_NM)
        return gradients[0], grad_left_NK.to(left_NK.dtype), grad_right_KM.to(right_KM.dtype), None


def _zipped(operand: Tensor, made: Tensor, axis: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Cut both into the same blocks along an axis: this bounds how many elements are converted at once."""
    count = -(-made.shape[axis] // AT_ONCE)
    return zip(torch.chunk(operand, count, axis), torch.chunk(made, count, axis), strict=True)


def _capabilities() -> Mapping[str, Any]:
    found: Mapping[str, Any] = torch.cpu.get_capabilities()
    return found
