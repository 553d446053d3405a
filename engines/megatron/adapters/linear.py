"""Megatron's linear layers with a frozen weight and a low-rank adapter.

A layer that fuses matrices (queries, keys and values; gate and up) concatenates their A's, so that it multiplies once.
Each B is a separate parameter.

Shapes: S tokens of a row, B rows, R rank, M adapted matrices of the layer, F outputs of the fused layer on this rank.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from megatron.core.tensor_parallel import (
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
    reduce_from_tensor_model_parallel_region,
    reduce_scatter_to_sequence_parallel_region,
    set_tensor_model_parallel_attributes,
)
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from torch import Tensor
from torch.nn.functional import pad

from prefect_rlhf.engines.cpu_products import added_product
from prefect_rlhf.engines.megatron.adapters.linear_layers import LINEAR_LAYERS, Fusion
from prefect_rlhf.engines.megatron.cpu.products import linear
from prefect_rlhf.engines.megatron.layers import NormedRowParallelLinear
from prefect_rlhf.placement.models.adapter import AdapterSpec


class AdaptedColumnLinear(ColumnParallelLinear):  # type: ignore[misc]
    """A layer with outputs split by tp: every rank holds each A completely, and its rows of each B."""

    def __init__(self, *args: Any, adapter: AdapterSpec, fusion: Fusion, **options: Any) -> None:
        super().__init__(*args, **options)
        self._fusion, self._scale, self._rank = fusion, adapter.scale, adapter.rank
        self.adapted = tuple(name for name in fusion.rows if name in adapter.matrices)
        self.lora_A = _parameter(self.weight, len(self.adapted) * adapter.rank, self.weight.shape[1], split=None)
        rows = {name: fusion.groups * fusion.rows[name] for name in self.adapted}
        self.lora_B = torch.nn.ParameterDict(
            {name: _parameter(self.weight, count, adapter.rank, split=0) for name, count in rows.items()}
        )

    def forward(self, input_: Tensor, *args: Any, **options: Any) -> tuple[Tensor, Tensor | None]:
        """Map [S, B, input] to [S, B, F]."""
        made, bias = super().forward(input_, *args, **options)
        narrow = linear(input_, self.lora_A)
        if self.sequence_parallel:
            narrow = gather_from_sequence_parallel_region(narrow, group=self.tp_group)
        else:
            narrow = copy_to_tensor_model_parallel_region(narrow, group=self.tp_group)
        return _added(made, narrow, self._fused_b(), self._scale), bias

    def matrices(self) -> Iterator[tuple[str, Tensor, Tensor]]:
        """Yield each adapted matrix with its A and B."""
        for name, a in zip(self.adapted, torch.split(self.lora_A, self._rank), strict=True):
            yield name, a, self.lora_B[name]

    def _fused_b(self) -> Tensor:
        """Return all B's as a matrix [F, M R], whose rows are in the layer's order: each reads its own A alone."""
        blocks, width = [], self._rank * len(self.adapted)
        for name, rows in self._fusion.rows.items():
            if name in self.adapted:
                before = self._rank * self.adapted.index(name)
                own = self.lora_B[name].view(self._fusion.groups, rows, self._rank)
                blocks.append(pad(own, (before, width - before - self._rank)))
            else:
                blocks.append(self.lora_A.new_zeros(self._fusion.groups, rows, width))
        return torch.cat(blocks, dim=1).view(-1, width)


class AdaptedRowLinear(RowParallelLinear):  # type: ignore[misc]
    """A layer with inputs split by tp: every rank holds its columns of A, and B completely."""

    def __init__(self, *args: Any, adapter: AdapterSpec, fusion: Fusion, **options: Any) -> None:
        super().__init__(*args, **options)
        self._scale, (self._matrix,) = adapter.scale, fusion.rows
        self.lora_A = _parameter(self.weight, adapter.rank, self.weight.shape[1], split=1)
        self.lora_B = _parameter(self.weight, self.weight.shape[0], adapter.rank, split=None)

    def forward(self, input_: Tensor) -> tuple[Tensor, Tensor | None]:
        """Map [S, B, input on this rank] to [S, B, H]."""
        made, bias = super().forward(input_)
        narrow = linear(input_, self.lora_A)
        if self.sequence_parallel:
            narrow = reduce_scatter_to_sequence_parallel_region(narrow, group=self.tp_group)
        else:
            narrow = reduce_from_tensor_model_parallel_region(narrow, group=self.tp_group)
        return _added(made, narrow, self.lora_B, self._scale), bias

    def matrices(self) -> Iterator[tuple[str, Tensor, Tensor]]:
        """Yield the adapted matrix with its A and B."""
        yield self._matrix, self.lora_A, self.lora_B


class AdaptedNormedRowLinear(NormedRowParallelLinear, AdaptedRowLinear):
    """An adapted layer followed by a norm, which is applied after the adapter's output has been added."""


def adapted_matrices(layer: Any) -> Iterator[tuple[str, Tensor, Tensor]]:
    """Yield each adapted matrix of a transformer layer with its A and B on this rank."""
    for module in (each.of(layer) for each in LINEAR_LAYERS):
        if isinstance(module, AdaptedColumnLinear | AdaptedRowLinear):
            yield from module.matrices()


def _parameter(beside: Tensor, rows: int, columns: int, split: int | None) -> torch.nn.Parameter:
    """Make a parameter on the device of a weight. If tp splits it, along `split`; else every rank has all of it.

    While tp divides tokens, ranks that have all of it have gradients from their own tokens, which Megatron sums.
    """
    made = torch.nn.Parameter(beside.new_zeros(rows, columns))
    set_tensor_model_parallel_attributes(made, split is not None, split or 0, 1)
    made.sequence_parallel = split is None  # type: ignore[attr-defined]
    made.is_adapter = True  # type: ignore[attr-defined]  # autograd makes its gradient
    return made


def _added(made: Tensor, narrow: Tensor, b_FR: Tensor, scale: float) -> Tensor:
    """Return made + scale * narrow @ B^T."""
    both = made.flatten(0, -2), narrow.flatten(0, -2)
    return added_product(*both, b_FR.t(), scale).view(made.shape)
