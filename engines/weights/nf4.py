"""NF4 with double quantisation in plain torch, bit for bit as bitsandbytes 0.50 computes it, but for a mean.

QLoRA (Dettmers et al. 2023, section 3): a number in a block of 64 becomes the nearest of 16 quantiles of a normal
distribution, times the block's largest absolute value. These scales, minus their mean, are quantised to eight bits in
blocks of 256 (Dettmers et al. 2022). bitsandbytes computes the mean in float32, in an order that depends on the number
of threads; here it is exact. bitsandbytes' own kernels on CUDA multiply without a whole dequantised matrix; here a
layer is dequantised before its product.

Shapes: O outputs and I inputs of a matrix, K scales of scales and their mean.
"""

from __future__ import annotations

from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import embedding

from prefect_rlhf.placement.models.four_bits import AT_ONCE, BLOCK, SCALES

QUANTILES = (
    *(-1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453),
    *(-0.28444138169288635, -0.18477343022823334, -0.09105003625154495, 0.0),
    *(0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224),
    *(0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0),
)
_LEAST = 1e-38  # the scale of a block of zeros, to divide by


class FourBits(NamedTuple):
    """A four-bit matrix: pairs of numbers [O, I / 2], scales of blocks [O, I / 64], and scales of these [K]."""

    pairs: Tensor
    absmax: Tensor
    nested_absmax: Tensor


Part = tuple[slice, slice]
"""Rows of a matrix, and the blocks of its columns."""
WHOLE = slice(None), slice(None)


def quantize(matrix_OI: Tensor, device: torch.device | None = None, part: Part = WHOLE) -> FourBits:
    """Quantise a part of a matrix on `device`, where the result stays; its columns must be whole blocks.

    The part gets the same numbers as in the whole matrix. Its scales depend on all of the matrix's blocks, so the whole
    matrix is read for these; everything else, which takes most of the time, is computed only for the part.
    """
    outputs, inputs = matrix_OI.shape
    device = device or matrix_OI.device
    rows, columns = (range(*each.indices(size)) for each, size in zip(part, (outputs, inputs // BLOCK), strict=True))
    midpoints = _midpoints(QUANTILES, device)
    absmax_OK = torch.empty(outputs, inputs // BLOCK, device=device)
    pairs = torch.empty(len(rows), len(columns) * BLOCK // 2, dtype=torch.uint8, device=device)
    num_rows = max(1, AT_ONCE // inputs)
    for first, lines in zip(range(0, outputs, num_rows), torch.split(matrix_OI, num_rows), strict=True):
        blocks = lines.to(device).float().view(len(lines), -1, BLOCK)
        scales = absmax_OK[first : first + len(lines)]
        torch.amax(blocks.abs(), dim=2, out=scales)
        start, stop = max(first, rows.start), min(first + len(lines), rows.stop)
        if start < stop:
            held = slice(start - first, stop - first), slice(columns.start, columns.stop)
            codes = _nearest(blocks[held], scales[held], midpoints).view(stop - start, -1, 2)
            pairs[start - rows.start : stop - rows.start] = codes[..., 0] << 4 | codes[..., 1]
    mean = _mean(absmax_OK)
    coded, nested = _quantized_scales(absmax_OK.view(-1) - mean)
    return FourBits(pairs, coded.view(outputs, -1)[part].contiguous(), torch.cat((nested, mean.view(1))))


def _mean(absmax: Tensor) -> Tensor:
    """Return the mean of scales in float32, whatever the order in which a device and its threads add them up.

    In float64 the sum of a million scales is exact if the largest is less than 500 times the least.
    """
    return absmax.mean(dtype=torch.float64).float()


def dequantize(made: FourBits, dtype: torch.dtype) -> Tensor:
    """Return a whole matrix [O, I]."""
    outputs, inputs = made.pairs.shape[0], 2 * made.pairs.shape[1]
    matrix_OI = torch.empty(outputs, inputs, dtype=dtype, device=made.pairs.device)
    write_numbers(matrix_OI, made.pairs, scales_of(made.absmax, made.nested_absmax, (0, 0), inputs))
    return matrix_OI


def scales_of(absmax: Tensor, nested_absmax: Tensor, first: tuple[int, int], columns: int) -> Tensor:
    """Return the blocks' scales in float32, in the shape of `absmax` [rows, blocks], which may be part of a matrix.

    The part begins at row and column `first` of a matrix with `columns` columns.
    """
    rows, blocks = absmax.shape
    device, of_row = absmax.device, columns // BLOCK
    row = torch.arange(first[0], first[0] + rows, device=device)
    column = torch.arange(first[1] // BLOCK, first[1] // BLOCK + blocks, device=device)
    group = torch.div(row[:, None] * of_row + column, SCALES, rounding_mode="floor")
    return _eight_bits(device)[absmax.int()] * nested_absmax[group] + nested_absmax[-1]


def write_numbers(matrix_OI: Tensor, pairs: Tensor, scales: Tensor) -> None:
    """Write the numbers of pairs [O, I / 2], times the scales [O, I / 64] of their blocks, in the matrix's format.

    Products are rounded from float32, as bitsandbytes rounds them.
    """
    table = _pairs_of_numbers(pairs.device)
    num_rows = max(1, AT_ONCE // matrix_OI.shape[1])
    parts = (torch.split(each, num_rows) for each in (matrix_OI, pairs, scales))
    for out, coded, scale in zip(*parts, strict=True):
        numbers = embedding(coded.int(), table).view(*scale.shape, BLOCK)
        torch.mul(numbers, scale[..., None], out=out.view(*scale.shape, BLOCK))


def _quantized_scales(values: Tensor) -> tuple[Tensor, Tensor]:
    """Quantise scales less their mean to eight bits in blocks of 256; the last block may be shorter."""
    padded = torch.nn.functional.pad(values, (0, -len(values) % SCALES)).view(-1, SCALES)
    absmax = padded.abs().amax(dim=1)
    if len(values) % SCALES:
        absmax[-1:].clamp_(min=_LEAST)  # as bitsandbytes does
    midpoints = _midpoints(tuple(_eight_bits(torch.device("cpu")).tolist()), values.device)
    return _nearest(padded, absmax, midpoints).view(-1)[: len(values)], absmax


def _nearest(blocks: Tensor, absmax: Tensor, midpoints: Tensor) -> Tensor:
    """Return the number of the nearest code of each value over its block's scale, as uint8."""
    shares = (blocks * (1.0 / absmax.clamp(min=_LEAST))[..., None]).clamp(-1, 1)
    return torch.bucketize(shares, midpoints, out_int32=True).to(torch.uint8)


@cache
def _midpoints(codes: tuple[float, ...], device: torch.device) -> Tensor:
    values = torch.tensor(codes, device=device)
    return (values[:-1] + values[1:]) / 2


@cache
def _pairs_of_numbers(device: torch.device) -> Tensor:
    """The two numbers of each byte, [256, 2]: the first is in the upper half."""
    values = torch.tensor(QUANTILES, device=device)
    return torch.cartesian_prod(values, values)


@cache
def _eight_bits(device: torch.device) -> Tensor:
    """The 256 codes of a scale: seven ranges of numbers, each a tenth of the next and half as fine, both signs."""
    codes = [0.0, 1.0]
    for exponent in range(7):
        edges = torch.linspace(0.1, 1, 2**exponent + 1)
        for sign in (10.0, -10.0):
            codes += (sign * 10.0 ** (exponent - 7) * (edges[:-1] + edges[1:]) / 2).tolist()
    return torch.tensor(sorted(codes), device=device)
