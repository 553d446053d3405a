"""NF4 in torch against numbers that bitsandbytes made (tests/data/make_nf4.py)."""

from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file

from prefect_rlhf.engines.weights import nf4
from prefect_rlhf.placement.models.weights import Parameter, four_bits_of
from tests.data.make_nf4 import FILE, SHAPES
from tests.support.device import DEVICE


@pytest.fixture(scope="module")
def of_bitsandbytes():
    return load_file(Path(FILE))


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("what", SHAPES)
def test_it_is_bitsandbytes_bit_for_bit(of_bitsandbytes, what, dtype):
    """Codes, scales, the scales' scales, their mean, and the numbers that these stand for."""
    theirs = {
        name.removeprefix(f"{what} {dtype} "): tensor.to(DEVICE)
        for name, tensor in of_bitsandbytes.items()
        if name.startswith(f"{what} {dtype} ")
    }
    made = nf4.quantize(theirs["matrix"])
    assert torch.equal(made.pairs.flatten(), theirs["pairs"].flatten())
    assert torch.equal(made.absmax.flatten(), theirs["absmax"].flatten())
    assert torch.equal(made.nested_absmax, torch.cat((theirs["nested_absmax"], theirs["offset"])))
    assert torch.equal(nf4.dequantize(made, theirs["matrix"].dtype), theirs["dequantized"])


@st.composite
def parts_of_a_matrix(draw):
    """A random matrix, and a part of it that cuts no block."""
    rows, blocks = draw(st.integers(1, 40)), draw(st.integers(1, 20))
    top, left = draw(st.integers(0, rows - 1)), draw(st.integers(0, blocks - 1))
    height, width = draw(st.integers(1, rows - top)), draw(st.integers(1, blocks - left))
    made = torch.randn(rows, 64 * blocks, generator=torch.Generator().manual_seed(rows * blocks))
    return made, (slice(top, top + height), slice(left, left + width))


@given(parts_of_a_matrix())
def test_a_part_has_the_numbers_of_the_whole(case):
    """Whatever rows and blocks a rank holds, it dequantises what the whole matrix has there, and quantises no more."""
    matrix, (rows, blocks) = case
    made = nf4.quantize(matrix)
    columns = slice(64 * blocks.start, 64 * blocks.stop)
    part = torch.empty_like(matrix[rows, columns])
    pairs = made.pairs[rows, 32 * blocks.start : 32 * blocks.stop]
    first = (rows.start, columns.start)
    scales = nf4.scales_of(made.absmax[rows, blocks], made.nested_absmax, first, matrix.shape[1])
    nf4.write_numbers(part, pairs, scales)
    assert torch.equal(part, nf4.dequantize(made, torch.float32)[rows, columns])
    alone = nf4.quantize(matrix, part=(rows, blocks))
    assert torch.equal(alone.pairs, made.pairs[rows, 32 * blocks.start : 32 * blocks.stop])
    assert torch.equal(alone.absmax, made.absmax[rows, blocks])
    assert torch.equal(alone.nested_absmax, made.nested_absmax)
    stated = four_bits_of(Parameter("q_proj.weight", tuple(matrix.shape)))
    assert [tuple(each.shape) for each in made] == [one.shape for one in stated]


@given(st.integers(1, 30), st.integers(1, 9), st.sampled_from([torch.float32, torch.bfloat16]))
def test_no_number_is_further_off_than_half_the_widest_gap(rows, blocks, dtype):
    """Of two neighbouring quantiles, times the largest value of its block; a scale in eight bits is off by less."""
    torch.manual_seed(blocks)
    matrix = torch.randn(rows, 64 * blocks).to(dtype)
    off = (nf4.dequantize(nf4.quantize(matrix), dtype).float() - matrix.float()).view(-1, 64).abs().amax(1)
    widest = max(b - a for a, b in zip(nf4.QUANTILES, nf4.QUANTILES[1:], strict=False)) / 2
    assert bool((off <= 1.1 * widest * matrix.float().view(-1, 64).abs().amax(1)).all())


def test_the_numbers_do_not_depend_on_how_many_are_made_at_once(monkeypatch):
    matrix = torch.randn(33, 192)
    whole = nf4.quantize(matrix)
    numbers = nf4.dequantize(whole, torch.bfloat16)
    monkeypatch.setattr(nf4, "AT_ONCE", 256)
    again = nf4.quantize(matrix)
    assert all(torch.equal(one, other) for one, other in zip(whole, again, strict=True))
    assert torch.equal(nf4.dequantize(again, torch.bfloat16), numbers)


def test_the_numbers_do_not_depend_on_the_number_of_threads():
    """With more ranks each has fewer threads, and these add up the scales of a large matrix in another order."""
    torch.manual_seed(0)
    matrix = torch.randn(512, 64 * 66) * torch.rand(512, 1)
    before, found = torch.get_num_threads(), []
    try:
        for number in (1, 2, 3, 5):
            torch.set_num_threads(number)
            found.append(nf4.quantize(matrix))
    finally:
        torch.set_num_threads(before)
    for other in found[1:]:
        assert all(torch.equal(*each) for each in zip(found[0], other, strict=True))
