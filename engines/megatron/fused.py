"""The layer pieces in torch's own fused kernels, as they run on CUDA.

Shapes: S tokens of a row, B rows, H hidden, F feed-forward, G key-value heads, Q query heads for each of them,
X = Q + 2 (queries, key, value), D head dimension.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


def rms_norm(x: Tensor, weight_H: Tensor, eps: float) -> Tensor:
    """Return x / sqrt(mean(x^2) + eps) * weight over the last axis."""
    return F.rms_norm(x, weight_H.shape, weight_H, eps)


def gated_silu(both: Tensor) -> Tensor:
    """Return silu(gate) * up of [..., 2F] with gate first."""
    gate, up = both.chunk(2, dim=-1)
    return F.silu(gate) * up


def causal_attention(qkv_SBGXD: Tensor, cos_SD: Tensor, sin_SD: Tensor) -> Tensor:
    """Rotate queries and keys by tables [S, D / 2], attend causally; return [S, B, G, Q, D]."""
    length, num_rows, groups, width, dim = qkv_SBGXD.shape
    first, second = qkv_SBGXD[..., :-1, :].chunk(2, dim=-1)
    cos, sin = (table[:, None, None, None] for table in (cos_SD, sin_SD))
    rotated = torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)
    heads = (rotated[..., :-1, :], rotated[..., -1:, :], qkv_SBGXD[..., -1:, :])
    query, key, value = (x.flatten(2, 3).permute(1, 2, 0, 3) for x in heads)
    mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True)
    return mixed.permute(2, 0, 1, 3).reshape(length, num_rows, groups, width - 2, dim)
