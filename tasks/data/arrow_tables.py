"""Columns of Parquet files, and of the Arrow files that Hugging Face `datasets` saves; the latter are memory-mapped."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import pyarrow as pa
import pyarrow.dataset as pds
import pyarrow.parquet as pq

from prefect_rlhf.placement.errors import InvalidInput
from prefect_rlhf.tasks.data.columns import ArrowColumn

UNREADABLE = (pa.ArrowException, OSError)


@dataclass(frozen=True)
class ParquetTable:
    """Parquet files of the same columns. `root` is a folder whose sub-folders may be named `column=value`, or None."""

    field: str
    files: tuple[str, ...]
    root: str | None = None

    @cached_property
    def _dataset(self) -> Any:
        """The dataset, with a schema that fits all files."""
        field = f"{self.field}.path"
        try:
            schemas = [pq.read_schema(file) for file in self.files]
            _check_names(field, [(file, schema.names) for file, schema in zip(self.files, schemas, strict=True)])
            partitioning = pds.HivePartitioning.discover(infer_dictionary=True) if self.root else None
            dataset = pds.dataset(self.root or list(self.files), format="parquet", partitioning=partitioning)
            return dataset.replace_schema(pa.unify_schemas([dataset.schema, *schemas]))
        except UNREADABLE as error:
            expected = f"Parquet that can be read ({error!s:.80})"
            raise InvalidInput(field, self.root or self.files[0], expected) from error

    @property
    def names(self) -> tuple[str, ...]:
        """The columns; columns from folder names are last."""
        return tuple(self._dataset.schema.names)

    @cached_property
    def num_rows(self) -> int:
        """Rows of all files."""
        return int(self._dataset.count_rows())

    def column(self, name: str) -> ArrowColumn:
        """Return a column of all files; reading it raises InvalidInput if a file is damaged."""

        def load() -> Any:
            try:
                return _valid(self._dataset.to_table(columns=[name])[name])
            except UNREADABLE as error:
                expected = f"whole Parquet files ({error!s:.120})"
                raise InvalidInput(f"{self.field}.path", self.root or self.files[0], expected) from error

        return ArrowColumn(self._dataset.schema.field(name).type, load)


@dataclass(frozen=True)
class SavedTable:
    """The Arrow files of a folder of `datasets.save_to_disk`, in order."""

    field: str
    files: tuple[str, ...]

    @cached_property
    def _table(self) -> Any:
        tables = [_mapped(self.field, file) for file in self.files]
        _check_names(f"{self.field}.path", [(f, t.schema.names) for f, t in zip(self.files, tables, strict=True)])
        try:
            return pa.concat_tables(tables, promote_options="default") if tables else pa.table({})
        except pa.ArrowException as error:
            expected = f"files of the same types ({error!s:.120})"
            raise InvalidInput(f"{self.field}.path", self.files[0], expected) from error

    @property
    def names(self) -> tuple[str, ...]:
        """The columns."""
        return tuple(self._table.schema.names)

    @property
    def num_rows(self) -> int:
        """Rows of all files."""
        return int(self._table.num_rows)

    def column(self, name: str) -> ArrowColumn:
        """Return a column of all files; reading it raises InvalidInput if a file is damaged."""

        def load() -> Any:
            try:
                return _valid(self._table[name])
            except UNREADABLE as error:
                expected = f"whole Arrow files ({error!s:.120})"
                raise InvalidInput(f"{self.field}.path", self.files[0], expected) from error

        return ArrowColumn(self._table.schema.field(name).type, load)


def _mapped(field: str, file: str) -> Any:
    try:
        return pa.ipc.open_stream(pa.memory_map(file)).read_all()
    except UNREADABLE as error:
        raise InvalidInput(f"{field}.path", file, f"a whole Arrow file ({error!s:.120})") from error


def _valid(values: Any) -> Any:
    """Return a ChunkedArray. Raises ArrowInvalid if it is damaged, for example if text is not UTF-8."""
    values.validate(full=True)
    return values


def _check_names(field: str, files: Sequence[tuple[str, Sequence[str]]]) -> None:
    """Raise InvalidInput for a file with two columns of the same name, and for files whose columns differ.

    Arrow would fill in nulls or drop a column.
    """
    for file, names in files:
        first, expected = files[0]
        twins = [name for name in names if names.count(name) > 1]
        if twins:
            raise InvalidInput(field, file, f"columns with different names; {twins[0]!r} occurs twice")
        if set(names) != set(expected):
            differing = ", ".join(sorted(set(names) ^ set(expected)))
            raise InvalidInput(field, file, f"the same columns as {first}, which differ in {differing}")
