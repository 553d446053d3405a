"""Rows on ranks: ragged columns in the store, padded tensors in a computation."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal, Protocol

from prefect_rlhf.errors.errors import InvalidInput
from prefect_rlhf.placement.models.outputs import OUTPUTS

if TYPE_CHECKING:
    from torch import Tensor

ColumnKind = Literal["number", "text", "other"]
"""The kind of a dataset's column; truth values are numbers."""
Column = Sequence["Tensor"]
"""A tensor per row: 0-d (a score), 1-d (tokens), or 2-d, [tokens, width] (a vector per token)."""

_KEYS_OF_CALLS = (
    *("tokens", "prompt_tokens", "prompt_length", "logprobs", "truncated", "values", "scores"),
    *("mask", "turn", "turn_rewards"),  # of plays
)


def keys_of_calls() -> tuple[str, ...]:
    """Return the keys that calls make. A dataset's column or a reward with such a name needs another name."""
    return (*_KEYS_OF_CALLS, *(name for name in OUTPUTS if name not in _KEYS_OF_CALLS))


class NoSuchColumn(KeyError):
    """A computation or a loss asked for a key that its rows lack; `there` are the keys that they have."""

    def __init__(self, key: object, there: Iterable[str]) -> None:
        super().__init__(key)
        self.key, self.there = key, tuple(there)


class Columns(dict[str, "Tensor"]):
    """The columns for a loss, each padded: [B] or [B, T]. Raises NoSuchColumn for another key."""

    def __missing__(self, key: str) -> Tensor:
        raise NoSuchColumn(key, self)


class DatasetColumns(Protocol):
    """The dataset columns that belong to some rows; each is read when it is used."""

    @property
    def kinds(self) -> Mapping[str, ColumnKind]:
        """The kind of each column."""
        ...

    def read(self, name: str) -> list[Any]:
        """Return a column's value for each row, as stored in the file; None for a missing value."""
        ...


class Batch(Mapping[str, "Tensor"]):
    """The rows that a computation receives: `batch[key]` is a column, with an entry for each row.

    A column is [B] or, right-padded with zeros, [B, longest] or [B, longest, width]; `columns` has it without padding.
    Number columns of the dataset are keys too (float64, NaN for null), and `values_of` reads any other column of it.
    `groups` [B] is equal for rows that were made from the same row, such as all responses to a prompt. `written_by` is
    the folder of the tokenizer that wrote the tokens, or why it is unknown. Raises NoSuchColumn for an unknown key.

    >>> import torch
    >>> batch = Batch({"logprobs": [torch.tensor([-1.0, -2.0]), torch.tensor([-3.0])]})
    >>> batch["logprobs"].tolist(), batch.mask("logprobs").tolist()
    ([[-1.0, -2.0], [-3.0, 0.0]], [[1.0, 1.0], [1.0, 0.0]])
    """

    def __init__(
        self,
        columns: Mapping[str, Column],
        groups: Tensor | None = None,
        dataset: DatasetColumns | None = None,
        written_by: str | InvalidInput | None = None,
    ) -> None:
        self.columns = dict(columns)
        self.written_by = written_by
        self._groups, self._dataset = groups, dataset

    def __getitem__(self, key: str) -> Tensor:
        if key in self.columns:
            return pad(self.columns[key])
        if self._dataset is not None and self._dataset.kinds.get(key) == "number":
            return numbers(self._dataset.read(key))
        raise NoSuchColumn(key, self.there)

    @property
    def groups(self) -> Tensor:
        """[B] int64: each row's group. A row that is made from a single row stays in its group."""
        if self._groups is None:
            raise NoSuchColumn("groups", self.there)
        return self._groups

    @property
    def tokenizer(self) -> str:
        """The folder of the tokenizer that wrote the tokens. Raises InvalidInput if several may have."""
        if isinstance(self.written_by, InvalidInput):
            raise self.written_by
        if self.written_by is None:
            raise NoSuchColumn("tokenizer", self.there)
        return self.written_by

    @property
    def there(self) -> tuple[str, ...]:
        """The available keys, including the dataset's columns."""
        return (*self.columns, *self.dataset_columns)

    @property
    def dataset_columns(self) -> tuple[str, ...]:
        """The dataset's columns, which `values_of` reads."""
        return tuple(self._dataset.kinds) if self._dataset is not None else ()

    def values_of(self, name: str) -> list[Any]:
        """Return a dataset column, with each row's value as the file stores it."""
        if self._dataset is None or name not in self._dataset.kinds:
            raise NoSuchColumn(name, self.there)
        return self._dataset.read(name)

    def __iter__(self) -> Iterator[str]:
        return iter(self.columns)

    def __len__(self) -> int:
        return len(self.columns)

    def mask(self, key: str) -> Tensor:
        """[B, longest] float: 1 where a row of `key` has a value."""
        import torch  # only in these functions: a flow that works on batches is traced and planned without torch

        if key not in self.columns:
            raise NoSuchColumn(key, self.there)
        lengths_B = torch.tensor([len(row) if row.dim() else 1 for row in self.columns[key]], dtype=torch.long)
        longest = max(lengths_B.tolist(), default=0)
        return (torch.arange(longest)[None] < lengths_B[:, None]).float()


def numbers(values: Sequence[float | bool | None]) -> Tensor:
    """Return [B] float64; NaN for None."""
    import torch

    return torch.tensor([float("nan") if value is None else float(value) for value in values], dtype=torch.float64)


def pad(column: Column) -> Tensor:
    """Stack scalars to [B]; right-pad sequences with zeros to [B, longest, ...]. Returns [0] without rows.

    >>> import torch
    >>> pad([torch.ones(2, 3), torch.ones(1, 3)]).shape
    torch.Size([2, 2, 3])
    """
    import torch

    if not column:
        return torch.empty(0)
    if column[0].dim() == 0:
        return torch.stack(list(column))
    return torch.nn.utils.rnn.pad_sequence(list(column), batch_first=True)


def unpad(padded: Tensor, lengths: Sequence[int]) -> list[Tensor]:
    """Undo `pad`: [B] to scalars, [B, T, ...] to the first lengths[b] values or vectors of each row."""
    if padded.dim() == 1:
        return list(padded)
    return [row[:length] for row, length in zip(padded, lengths, strict=True)]
