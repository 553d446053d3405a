"""Tokens of many rows on end, without padding: what every layer but attention works on.

Shapes: S tokens of the longest row, B rows, N real tokens. Packed order is by position, then row.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Packing:
    """Where each token of right-padded rows is among the packed ones.

    >>> packing = Packing.of(torch.tensor([2, 3]), length=3)
    >>> packing.place_SB.tolist(), packing.token_N.tolist(), packing.pads.tolist()
    ([[0, 1], [2, 3], [0, 4]], [0, 1, 2, 3, 5], [4])
    """

    place_SB: Tensor  # place among the N packed tokens; 0 at padding
    token_N: Tensor  # place among the S * B padded tokens
    pads: Tensor  # places of padding among the S * B
    keeps_padding: bool = False

    @classmethod
    def of(cls, lengths_B: Tensor, length: int, keep_padding: bool = False) -> Packing:
        """Pack rows of these lengths, padded to `length`. With `keep_padding` nothing is left out."""
        position_S1 = torch.arange(length, device=lengths_B.device)[:, None]
        real_SB = (position_S1 < lengths_B[None]) | keep_padding
        place_SB = (real_SB.flatten().cumsum(0).view(real_SB.shape) - 1) * real_SB
        return cls(place_SB, real_SB.flatten().nonzero()[:, 0], (~real_SB).flatten().nonzero()[:, 0], keep_padding)

    def pack(self, padded: Tensor) -> Tensor:
        """[S, B, ...] to [N, ...]."""
        flat = padded.flatten(0, 1)
        if not self.pads.numel():
            return flat
        apply: Callable[..., Tensor] = _Pack.apply
        return apply(flat, self)

    def spread(self, packed: Tensor) -> Tensor:
        """[N, ...] to [S, B, ...]; padding holds anything, and its gradient is dropped."""
        shape = (*self.place_SB.shape, *packed.shape[1:])
        if not self.pads.numel():
            return packed.view(shape)
        apply: Callable[..., Tensor] = _Spread.apply
        return apply(packed, self).view(shape)


class _Pack(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, flat: Tensor, packing: Packing) -> Tensor:
        ctx.packing = packing
        return flat.index_select(0, packing.token_N)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        spread = gradients[0].index_select(0, ctx.packing.place_SB.flatten())
        return spread.index_fill_(0, ctx.packing.pads, 0), None


class _Spread(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, packed: Tensor, packing: Packing) -> Tensor:
        ctx.packing = packing
        return packed.index_select(0, packing.place_SB.flatten())

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return gradients[0].index_select(0, ctx.packing.token_N), None
