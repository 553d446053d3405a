"""Megatron's linear layers with a frozen weight in four bits, which each product dequantises.

The dequantised weight exists only during the product; a backward pass dequantises it again.

Shapes: F outputs and I inputs of the layer on this rank.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from prefect_rlhf.engines.megatron.adapters.linear_layers import HeldMatrices
from prefect_rlhf.engines.weights.nf4 import scales_of, write_numbers
from prefect_rlhf.placement.models.four_bits import BLOCK, nested_scales


class FourBitLinear:
    """The part of a layer that holds its weight in four bits, as a mixin: classes from `in_four_bits` begin with it."""

    weight: Tensor

    def __init__(self, *args: Any, held: HeldMatrices, **options: Any) -> None:
        super().__init__(*args, **options)
        whole = self.weight
        rows, columns = whole.shape
        self._held, self._dtype = held, whole.dtype
        self.weight = _frozen(whole, rows, columns // 2)
        self.absmax = _frozen(whole, rows, columns // BLOCK)
        # The bytes of numbers in float32: Megatron converts the format of all other parameters.
        scales = {each.name: nested_scales(each.shape[0] * each.shape[1] // BLOCK) for each in held.matrices}
        self.nested_absmax = torch.nn.ParameterDict({name: _frozen(whole, 4 * count) for name, count in scales.items()})

    def nested(self) -> Iterator[Tensor]:
        """Yield each fused matrix's scales of scales in float32, and their mean."""
        for matrix in self._held.matrices:
            yield self.nested_absmax[matrix.name].view(torch.float32)

    def dequantized(self) -> Tensor:
        """Return the weight [F, I] in the compute format."""
        made = torch.empty(self.weight.shape[0], 2 * self.weight.shape[1], dtype=self._dtype, device=self.weight.device)
        write_numbers(made, self.weight, self._scales())
        return made

    def _scales(self) -> Tensor:
        """Return the scale of each block, [F, I / 64], in float32."""
        fusion = self._held.fusion
        made = torch.empty(self.absmax.shape, device=self.absmax.device)
        rows = list(fusion.rows.values())
        views = (torch.split(each.view(fusion.groups, sum(rows), -1), rows, 1) for each in (made, self.absmax))
        for matrix, nested, out, coded in zip(self._held.matrices, self.nested(), *views, strict=True):
            scales = scales_of(coded.flatten(0, 1), nested, matrix.first, matrix.shape[1])
            out.copy_(scales.view(out.shape))
        return made

    def _forward_impl(self, *args: Any, weight: Tensor, **options: Any) -> Tensor:
        """See Megatron's: the product with the whole weight, which the backward pass makes again."""
        made = self.dequantized()
        place = made.data_ptr()

        def keep(tensor: Tensor) -> Tensor | None:
            return None if tensor.data_ptr() == place else tensor

        def again(kept: Tensor | None) -> Tensor:
            return self.dequantized() if kept is None else kept

        with saved_tensors_hooks(keep, again):
            product: Tensor = super()._forward_impl(*args, weight=made, **options)  # type: ignore[misc]
        return product


@cache
def in_four_bits(layer: type) -> type:
    """Return a subclass of Megatron's linear layer that holds its weight in four bits."""
    return type(f"FourBit{layer.__name__}", (FourBitLinear, layer), {})


def stored_tensors(layer: Any) -> Sequence[tuple[str, Tensor]]:
    """Return a layer's tensors that have the rows of its weight, by the end of their names."""
    scales = ((".absmax", layer.absmax),) if isinstance(layer, FourBitLinear) else ()
    return ("", layer.weight), *scales


def _frozen(beside: Tensor, *shape: int) -> torch.nn.Parameter:
    return torch.nn.Parameter(beside.new_empty(shape, dtype=torch.uint8), requires_grad=False)
