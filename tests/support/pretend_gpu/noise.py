"""Differences of the size of those between a GPU's kernels and a CPU's, the same in each run.

So a test whose tolerance only a CPU meets fails on the pretend GPU, while two runs on it are equal bit for bit.
"""

from typing import Any

import torch
from torch import Tensor

aten = torch.ops.aten
UNITS: dict[Any, float] = {
    aten._softmax.default: 32,  # torch's on a CPU was seen 30 units from the exact one
    **dict.fromkeys((aten._log_softmax.default, aten.logsumexp.default, aten.exp.default), 2),
    # Sums in another order.
    **dict.fromkeys((aten.mm.default, aten.addmm.default, aten.bmm.default, aten.baddbmm.default), 1),
    **dict.fromkeys((aten.sum.dim_IntList, aten.mean.dim, aten._scaled_dot_product_flash_attention_for_cpu.default), 1),
}
"""Units of rounding in float32, by operator. A result in bfloat16 is rounded once, so nearly all of them are equal."""

_pattern = torch.empty(0)


def add_noise(func: Any, made: Any) -> None:
    """Change the result of an operator, in place, by at most its units of rounding."""
    first = made[0] if isinstance(made, (tuple, list)) else made
    if func in UNITS and isinstance(first, Tensor) and first.dtype == torch.float32:
        first.mul_(_signs(first.numel()).view(first.shape).mul(UNITS[func] * torch.finfo(torch.float32).eps).add(1))


def _signs(count: int) -> Tensor:
    """Return numbers between -1 and 1 that depend on their index alone."""
    global _pattern
    if len(_pattern) < count:
        size = 1 << max(10, (count - 1).bit_length())
        _pattern = torch.rand(size, generator=torch.Generator().manual_seed(0)).mul_(2).sub_(1)
    return _pattern[:count]
