"""A fingerprint of weights that is independent of how and on which devices they are split.

By definition, modulo 2**64, a parameter's fingerprint is

    name_factor * sum over its elements of  bits(element) * row_factor(row) * column_factor(word) * 2**(bits * lane)

where bits(element) is an unsigned integer, `row` the index on the first of two axes in the global tensor (0 for a
vector), and the index on the last axis is word * lanes + lane, with as many lanes as elements fit in 8 bytes. So shards
of a parameter add up to the same number under every layout. And because 8 bytes of adjacent elements are a single
little-endian integer, an integer matrix-vector product weighs whole words at the speed of memory. Factors are odd, so
no change of a single element goes unseen.
"""

from collections.abc import Iterator, Mapping
from hashlib import blake2b
from typing import final

import torch
from torch import Tensor

from prefect_rlhf.engines.commands import FINGERPRINT_MODULUS
from prefect_rlhf.engines.engine import Shard

WORD_BYTES = 8
_BITS_DTYPE = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_CHUNK_ELEMENTS = 1 << 16  # of the element-wise path: the elements widened to int64 at once fit in the cache
_CUDA_PRODUCTS = 1 << 24  # products that a GPU computes at once: 128 MiB
_SAMPLE_STRIDE = 64  # a sample weighs every 64th row


class Factors:
    """Odd pseudo-random multipliers by row and by word column, made once for the largest shard seen."""

    def __init__(self) -> None:
        self._tables: dict[tuple[str, torch.device], Tensor] = {}
        self._slices: dict[tuple[str, int, int, torch.device], Tensor] = {}  # slicing would be half of a sample's time

    def rows(self, start: int, stop: int, device: torch.device) -> Tensor:
        return self._slice("row", start, stop, device)

    def columns(self, start: int, stop: int, device: torch.device) -> Tensor:
        return self._slice("column", start, stop, device)

    def _slice(self, axis: str, start: int, stop: int, device: torch.device) -> Tensor:
        key = axis, start, stop, device
        if key not in self._slices:
            self._slices[key] = self._table(axis, stop, device)[start:stop]
        return self._slices[key]

    def _table(self, axis: str, size: int, device: torch.device) -> Tensor:
        table = self._tables.get((axis, device))
        if table is None or len(table) < size:
            table = self._tables[axis, device] = factors(axis, size).to(device)
        return table


def digest(shards: Mapping[str, Shard], table: Factors | None = None) -> dict[str, int]:
    """Return each shard's contribution to its parameter's fingerprint. Pass the same `table` to avoid computing it
    again.
    """
    table = table or Factors()
    sums = [_weighed_sum(shard, table) for shard in shards.values()]
    values = torch.stack(sums).tolist() if sums else []  # at once, because each read of a GPU waits for it
    return {name: value * name_factor(name) % FINGERPRINT_MODULUS for name, value in zip(shards, values, strict=True)}


@final
class Sample:
    """Sums of every 64th row of each shard (of a single part of it if it is fused with others), and of whole vectors.

    The key decides which rows. Their views are made once, because that takes longer than summing the rows.
    """

    def __init__(self, shards: Mapping[str, Shard], key: str, table: Factors | None = None) -> None:
        self._table, self._start = table or Factors(), _hash(key)
        self._look_at(shards)
        self._sums = self._summed()

    def changed(self, shards: Mapping[str, Shard]) -> list[str]:
        """Return the shards with sampled rows that were written or replaced since the sample was taken."""
        if self._places != _places(shards):
            self._look_at(shards)
        sums = self._summed()
        if torch.equal(sums, self._sums):
            return []
        parts = (torch.split(each, [len(rows) for rows in self._rows.values()]) for each in (sums, self._sums))
        return [name for name, now, then in zip(self._rows, *parts, strict=True) if not torch.equal(now, then)]

    def _look_at(self, shards: Mapping[str, Shard]) -> None:
        self._places = _places(shards)
        self._rows = {name: _some_rows(shard.view, self._start) for name, shard in shards.items()}
        widths = ((_as_words(rows).shape[1], rows.device) for rows in self._rows.values())
        self._factors = [self._table.columns(0, width, device) for width, device in widths]

    def _summed(self) -> Tensor:
        pairs = zip(self._rows.values(), self._factors, strict=True)
        sums = [_row_sums(_as_words(rows), factors) for rows, factors in pairs]
        return torch.cat(sums) if sums else torch.empty(0, dtype=torch.int64)


def factors(axis: str, size: int) -> Tensor:
    """Return the first `size` factors of an axis (`row` or `column`) as int64: splitmix64 of the index, made odd."""
    x = torch.arange(1, size + 1) * _signed(0x9E3779B97F4A7C15) + _signed(_hash(axis))
    x = (x ^ _shifted(x, 30)) * _signed(0xBF58476D1CE4E5B9)
    x = (x ^ _shifted(x, 27)) * _signed(0x94D049BB133111EB)
    return (x ^ _shifted(x, 31)) | 1


def name_factor(name: str) -> int:
    """Return the odd multiplier of a parameter."""
    return _hash(f"parameter {name}") | 1


def _weighed_sum(shard: Shard, table: Factors) -> Tensor:
    """Return the contribution of a shard to its parameter's fingerprint, without the name's factor; a number."""
    (first, last), rows = shard.region[-1], _global_rows(shard)
    lanes = WORD_BYTES // shard.view.element_size()
    row_factors = table.rows(rows.start, rows.stop, shard.view.device)
    if first % lanes == 0 and last % lanes == 0 and shard.view.shape[-1] == last - first and _has_words(shard.view):
        column_factors = table.columns(first // lanes, last // lanes, shard.view.device)
        return _weigh_words(shard.view.view(torch.int64), row_factors, column_factors)
    column_factors = table.columns(first // lanes, -(-last // lanes), shard.view.device)
    return _weigh_elements(shard, row_factors, column_factors)


def _global_rows(shard: Shard) -> range:
    """Return the rows of a shard: the index on the first of two axes; 0 for a vector."""
    if len(shard.region) == 1:
        return range(1)
    if len(shard.region) == 2:
        return range(*shard.region[0])
    raise ValueError(f"a parameter of {len(shard.region)} axes has no fingerprint")


def _has_words(view: Tensor) -> bool:
    """Return whether a view can be read as words of 8 bytes without a copy."""
    lanes = WORD_BYTES // view.element_size()
    strides_fit = view.stride(-1) == 1 and all(stride % lanes == 0 for stride in view.stride()[:-1])
    return strides_fit and view.shape[-1] % lanes == 0 and view.data_ptr() % WORD_BYTES == 0


def _weigh_words(words: Tensor, row_factors: Tensor, column_factors: Tensor) -> Tensor:
    """Sum words * row factor * column factor; leading axes of `words` are the row axis, split."""
    if words.is_cuda:  # the launches of many parts would outlast their sums
        return _weighed(_row_sums(words, column_factors), row_factors)
    sums = [_row_sums(part, column_factors) for part in _matrices(words)]
    return _weighed(sums[0] if len(sums) == 1 else torch.cat(sums), row_factors)


def _matrices(words: Tensor) -> Iterator[Tensor]:
    """Split leading axes until two are left, without a copy."""
    if words.dim() > 2:
        for part in words:
            yield from _matrices(part)
    else:
        yield words if words.dim() == 2 else words[None]


def _row_sums(words: Tensor, column_factors: Tensor) -> Tensor:
    """Sum words * column factor along the last axis; on a GPU, `words` may have any number of axes."""
    if words.is_cuda:  # has no integer matrix-vector product
        parts = words if words.dim() > 1 else words[None]
        at_once = max(1, _CUDA_PRODUCTS // max(1, parts.shape[1:].numel()))
        return torch.cat([(part * column_factors).sum(-1).flatten() for part in torch.split(parts, at_once)])
    return torch.mv(words, column_factors)


def _weighed(rows: Tensor, factors: Tensor) -> Tensor:
    return (rows * factors).sum() if rows.is_cuda else torch.dot(rows, factors)


def _weigh_elements(shard: Shard, row_factors: Tensor, column_factors: Tensor) -> Tensor:
    """Follow the definition, element by element: for regions that cut a word, and views that cut a row."""
    size = shard.view.element_size()
    lanes = WORD_BYTES // size
    first, last = shard.region[-1]
    columns = torch.arange(first, last, device=shard.view.device)
    factors = column_factors[columns // lanes - first // lanes] << (8 * size * (columns % lanes))
    matrix = shard.view.reshape(-1, last - first).view(_BITS_DTYPE[size])
    unsigned = 2 ** (8 * size) - 1 if size < WORD_BYTES else -1
    at_once = _CUDA_PRODUCTS // 4 if matrix.is_cuda else _CHUNK_ELEMENTS  # as int64 they exist three times
    per_chunk = max(1, at_once // (last - first))
    chunks = zip(torch.split(matrix, per_chunk), torch.split(row_factors, per_chunk), strict=True)
    return torch.stack([_weighed(_row_sums(part.long() & unsigned, factors), rows) for part, rows in chunks]).sum()


def _places(shards: Mapping[str, Shard]) -> list[int]:
    return [shard.view.data_ptr() for shard in shards.values()]


def _some_rows(view: Tensor, start: int) -> Tensor:
    """Return the rows [rows, columns] of a sample as a view, of words of 8 bytes if they are made of words."""
    while view.dim() > 2:  # a view of a fused weight: use a single part
        view = view[start % len(view)]
    matrix = view if view.dim() == 2 else view[None]
    rows = matrix[start % min(_SAMPLE_STRIDE, len(matrix)) :: _SAMPLE_STRIDE]
    return rows.view(torch.int64) if _has_words(rows) else rows


def _as_words(rows: Tensor) -> Tensor:
    """Return rows of a sample as words of 8 bytes; rows that are not made of words are widened, exactly."""
    return rows if rows.dtype == torch.int64 else rows.double().view(torch.int64)


def _shifted(x: Tensor, bits: int) -> Tensor:
    """Shift a signed tensor right, logically."""
    return (x >> bits) & ((1 << (64 - bits)) - 1)


def _signed(value: int) -> int:
    """Return the int64 with these 64 bits."""
    return value - FINGERPRINT_MODULUS if value >= FINGERPRINT_MODULUS // 2 else value


def _hash(text: str) -> int:
    return int.from_bytes(blake2b(text.encode(), digest_size=8).digest(), "little")
