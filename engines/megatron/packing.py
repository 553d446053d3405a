"""Tokens of many rows concatenated without padding, on which every layer except attention works; and host tensors
concatenated for a single copy to a device.

Shapes: S tokens of the longest row, B rows, N real tokens and filler. Packed order is by position, then row.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

ALIGNED = 16  # bytes: a multiple of every format's size


@dataclass(frozen=True, slots=True)
class Packing:
    """The positions of right-padded rows' tokens among the packed tokens.

    The last `filler` packed tokens are unused copies of the first, because a pipeline sends only tensors of a fixed
    shape.

    >>> packing = Packing.of(torch.tensor([2, 3]), length=3)
    >>> packing.place_SB.tolist(), packing.token_N.tolist(), packing.pads.tolist()
    ([[0, 1], [2, 3], [0, 4]], [0, 1, 2, 3, 5], [4])
    """

    place_SB: Tensor  # place among the N packed tokens; 0 at padding
    token_N: Tensor  # place among the S * B padded tokens; 0 for filler, which is a token too
    pads: Tensor  # places of padding among the S * B
    filler: int = 0

    @classmethod
    def of(cls, lengths_B: Tensor, length: int, num_tokens: int | None = None) -> Packing:
        """Pack rows of these lengths, padded to `length`, and fill up to `num_tokens`."""
        position_S1 = torch.arange(length, device=lengths_B.device)[:, None]
        real_SB = position_S1 < lengths_B[None]
        place_SB = (real_SB.flatten().cumsum(0).view(real_SB.shape) - 1) * real_SB
        token_N = real_SB.flatten().nonzero()[:, 0]
        filler = 0 if num_tokens is None else num_tokens - len(token_N)
        return cls(
            place_SB,
            torch.cat((token_N, token_N.new_zeros(filler))),
            (~real_SB).flatten().nonzero()[:, 0],
            filler,
        )

    def to(self, device: torch.device) -> Packing:
        """Move it to a device."""
        place_SB, token_N, pads = to_device((self.place_SB, self.token_N, self.pads), device)
        return Packing(place_SB, token_N, pads, self.filler)

    def pack(self, padded: Tensor) -> Tensor:
        """Map [S, B, ...] to [N, ...]."""
        flat = padded.flatten(0, 1)
        if self._is_view:
            return flat
        apply: Callable[..., Tensor] = _Pack.apply
        return apply(flat, self)

    def spread(self, packed: Tensor) -> Tensor:
        """Map [N, ...] to [S, B, ...]; values at padding are arbitrary, and their gradients are dropped."""
        shape = (*self.place_SB.shape, *packed.shape[1:])
        if self._is_view:
            return packed.view(shape)
        apply: Callable[..., Tensor] = _Spread.apply
        return apply(packed, self).view(shape)

    @property
    def _is_view(self) -> bool:
        return not self.pads.numel() and not self.filler


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
        packed = gradients[0].index_select(0, ctx.packing.token_N)
        if ctx.packing.filler:
            packed[-ctx.packing.filler :] = 0
        return packed, None


def to_device(tensors: Sequence[Tensor], device: torch.device) -> list[Tensor]:
    """Copy tensors of any formats and shapes from the host to a device; for CPU they are returned unchanged.

    They travel in a single copy, because each copy waits until the device has done its queued work.

    >>> whole, half = to_device([torch.arange(3), torch.tensor([0.5])], torch.device("cpu"))
    >>> whole.tolist(), half.tolist()
    ([0, 1, 2], [0.5])
    """
    if device.type == "cpu" or not tensors:
        return list(tensors)
    flat = [tensor.contiguous().view(-1).view(torch.uint8) for tensor in tensors]
    padded = [F.pad(each, (0, -len(each) % ALIGNED)) for each in flat]
    parts = torch.split(torch.cat(padded).to(device), [len(each) for each in padded])
    return [
        part[: len(each)].view(tensor.dtype).view(tensor.shape)
        for part, each, tensor in zip(parts, flat, tensors, strict=True)
    ]
