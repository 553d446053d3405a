"""Reads a base in four bits: a matrix is quantised as a whole, then cut, so its numbers are equal under all plans."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from prefect_rlhf.engines.engine import Shard
from prefect_rlhf.engines.files.tensor_files import OpenTensors
from prefect_rlhf.placement.models.model import Dtype, ModelSpec
from prefect_rlhf.placement.models.weights import four_bits_of, quantized_matrices

if TYPE_CHECKING:
    from torch import Tensor


def fill_quantized(shards: Mapping[str, Shard], spec: ModelSpec, checkpoint: OpenTensors) -> frozenset[str]:
    """Write a rank's regions of four-bit matrices into the views among `shards`; return their names.

    A matrix is converted to the model's format first, as transformers does, and quantised on the views' device.
    """
    import torch

    from prefect_rlhf.engines.weights.nf4 import quantize

    filled: set[str] = set()
    for matrix in quantized_matrices(spec):
        names = [one.name for one in four_bits_of(matrix)]
        if not all(name in shards for name in names):
            continue
        whole = checkpoint.read(matrix.name, tuple((0, size) for size in matrix.shape))
        made = quantize(whole.to(getattr(torch, spec.dtype)), shards[names[0]].view.device)
        for name, values in zip(names, made, strict=True):
            shard = shards[name]
            shard.view.copy_(values[tuple(slice(*span) for span in shard.region)].view(shard.view.shape))
        filled.update(names)
    return frozenset(filled)


def as_in_four_bits(matrix: Tensor, dtype: Dtype) -> Tensor:
    """Return a matrix with its values rounded to four bits, in the model's format."""
    import torch

    from prefect_rlhf.engines.weights.nf4 import dequantize, quantize

    return dequantize(quantize(matrix.to(getattr(torch, dtype))), getattr(torch, dtype))
