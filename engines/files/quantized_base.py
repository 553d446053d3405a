"""Reads a base in four bits: a part of a matrix has the numbers of the whole, so they are equal under all plans."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from prefect_rlhf.engines.engine import Shard
from prefect_rlhf.engines.files.tensor_files import OpenTensors
from prefect_rlhf.placement.models.model import Dtype, ModelSpec
from prefect_rlhf.placement.models.weights import Parameter, four_bits_of, quantized_matrices

if TYPE_CHECKING:
    import torch
    from torch import Tensor


def fill_quantized(shards: Mapping[str, Shard], spec: ModelSpec, checkpoint: OpenTensors) -> frozenset[str]:
    """Write a rank's regions of four-bit matrices into the views among `shards`; return their names.

    They are quantised on the views' device.
    """
    filled: set[str] = set()
    for matrix in quantized_matrices(spec):
        names = [one.name for one in four_bits_of(matrix)]
        if not all(name in shards for name in names):
            continue
        rows, blocks = (slice(*span) for span in shards[names[1]].region)
        device = shards[names[0]].view.device
        for name, values in read_quantized(matrix, spec.dtype, checkpoint, device, (rows, blocks)).items():
            view = shards[name].view
            view.copy_(values.view(view.shape))
        filled.update(names)
    return frozenset(filled)


def read_quantized(
    matrix: Parameter,
    dtype: Dtype,
    checkpoint: OpenTensors,
    device: torch.device | None = None,
    part: tuple[slice, slice] = (slice(None), slice(None)),
) -> dict[str, Tensor]:
    """Return the tensors in four bits of a part of a folder's matrix, by their names; of the scales of scales, all.

    The part is of rows and of blocks of columns. The matrix is converted to the model's format first, as transformers
    does.
    """
    import torch

    from prefect_rlhf.engines.weights.nf4 import quantize

    whole = checkpoint.read(matrix.name, tuple((0, size) for size in matrix.shape))
    made = quantize(whole.to(getattr(torch, dtype)), device, part)
    return {one.name: values for one, values in zip(four_bits_of(matrix), made, strict=True)}


def as_in_four_bits(matrix: Tensor, dtype: Dtype) -> Tensor:
    """Return a matrix with its values rounded to four bits, in the model's format."""
    import torch

    from prefect_rlhf.engines.weights.nf4 import dequantize, quantize

    return dequantize(quantize(matrix.to(getattr(torch, dtype))), getattr(torch, dtype))
