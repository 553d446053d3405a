"""Rotary position embedding (Su et al. 2021): its tables, and the rotation in place.

Shapes: S positions, D head dimension.
"""

import torch
from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding
from torch import Tensor

from prefect_rlhf.placement.models.model import RopeScaling


class Rotary:
    """Cosines and sines, computed once for all layers. Rows start at position 0."""

    def __init__(self, theta: float, head_dim: int, scaling: RopeScaling | None = None) -> None:
        self._frequencies = 1.0 / theta ** (torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim)
        if scaling is not None:
            # Slow down long wavelengths as Megatron's own embedding does; its constructor accepts only the factor.
            factors = scaling.factor, scaling.low_freq_factor, scaling.high_freq_factor, scaling.original_context
            self._frequencies = RotaryEmbedding._apply_scaling(None, self._frequencies, *factors)
        self._longest: tuple[Tensor, Tensor] | None = None

    def tables(self, length: int, like: Tensor) -> tuple[Tensor, Tensor]:
        """(cos, sin), each [S, D / 2], in the format and on the device of `like`."""
        if self._longest is None or self._longest[0].shape[0] < length:
            angles = torch.outer(torch.arange(length, dtype=torch.float32), self._frequencies)
            self._longest = (angles.cos().to(like), angles.sin().to(like))
        return self._longest[0][:length], self._longest[1][:length]


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> None:
    """Rotate pairs (i, i + D / 2) of [..., S, D] in place by the angle of each position."""
    half = x.shape[-1] // 2
    exchanged = torch.cat((x[..., half:], x[..., :half]), dim=-1)
    x.mul_(torch.cat((cos, cos), dim=-1)).addcmul_(exchanged, torch.cat((-sin, sin), dim=-1))
