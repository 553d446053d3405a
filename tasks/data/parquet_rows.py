"""Columns of a Parquet file or a folder of them, one split of its rows, checked before anything is started."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from prefect_rlhf.placement.errors import InvalidInput
from prefect_rlhf.placement.path_text import checked_path


@dataclass(frozen=True, slots=True)
class ParquetRows:
    """The place of a dataset's rows; `field` is the parameter that errors name."""

    field: str
    path: str
    split_column: str | None
    split: str

    def read(self, columns: Sequence[str]) -> Any:
        """Return a pyarrow table of columns, in the file's order. Raises InvalidInput for what cannot be read."""
        schema = self.schema()
        for name in columns:
            if name not in schema.names:
                raise InvalidInput(f"{self.field}.{name}", self.path, f"a file with column {name!r}; {_has(schema)}")
        with_split = [*columns, self.split_column] if self.split_column else list(columns)
        try:
            table = pq.read_table(self.path, columns=list(dict.fromkeys(with_split)))
            table.validate(full=True)  # text that is no UTF-8, among others
        except (pa.ArrowException, OSError) as error:
            raise InvalidInput(f"{self.field}.path", self.path, f"whole Parquet files ({error!s:.120})") from error
        return self._of_split(table).select(list(columns))

    def schema(self) -> Any:
        """Return names and types of the columns. Raises InvalidInput for no Parquet file and for no split column."""
        field = f"{self.field}.path"
        if not checked_path(field, self.path).exists():
            raise InvalidInput(field, self.path, "an existing Parquet file or folder of Parquet files")
        _check_files(field, Path(self.path))
        try:
            schema = pq.ParquetDataset(self.path).schema
        except (pa.ArrowException, OSError, IndexError) as error:
            raise InvalidInput(field, self.path, f"Parquet that can be read ({error!s:.80})") from error
        if not schema.names:
            raise InvalidInput(field, self.path, "Parquet with columns; there is none")
        twins = [name for name in schema.names if schema.names.count(name) > 1]
        if twins:
            raise InvalidInput(field, self.path, f"columns of different names; {twins[0]!r} stands twice")
        if self.split_column is not None and self.split_column not in schema.names:
            expected = f"a column of {self.path}, or empty to read all rows; {_has(schema)}"
            raise InvalidInput(f"{self.field}.split_column", self.split_column, expected)
        return schema

    def _of_split(self, table: Any) -> Any:
        if table.num_rows == 0:
            raise InvalidInput(f"{self.field}.path", self.path, "a file with at least one row")
        if self.split_column is None:
            return table
        splits = table[self.split_column].to_pylist()
        rows = [row for row, split in enumerate(splits) if split == self.split]
        if not rows:
            names = ", ".join(sorted({str(split) for split in splits})[:8])
            raise InvalidInput(f"{self.field}.split", self.split, f"a split of {self.path}: {names}")
        return table.take(rows)


def require_text(rows: ParquetRows, column: str, allow_messages: bool = False) -> None:
    """Raise InvalidInput unless the column holds strings (or, where allowed, lists of role and content)."""
    kind = decoded(rows.schema().field(column).type)
    if is_text(kind) or (allow_messages and is_messages(kind)):
        return
    expected = "strings, or lists of {role, content}" if allow_messages else "strings"
    raise InvalidInput(f"{rows.field}.{column}", str(kind), expected)


def is_text(kind: Any) -> bool:
    """Return whether an Arrow type is a string, however it is stored."""
    kind = decoded(kind)
    return bool(pa.types.is_string(kind) or pa.types.is_large_string(kind) or pa.types.is_string_view(kind))


def decoded(kind: Any) -> Any:
    """Return the type of the values of an Arrow type: of pandas categories, which are a dictionary's, their words'."""
    return kind.value_type if pa.types.is_dictionary(kind) else kind


def is_messages(kind: Any) -> bool:
    """Return whether an Arrow type is list<struct<role: string, content: string>>."""
    if not (pa.types.is_list(kind) or pa.types.is_large_list(kind)) or not pa.types.is_struct(kind.value_type):
        return False
    fields = {kind.value_type.field(i).name: kind.value_type.field(i).type for i in range(kind.value_type.num_fields)}
    return {"role", "content"} <= set(fields) and all(is_text(fields[name]) for name in ("role", "content"))


def _check_files(field: str, path: Path) -> None:
    """Raise InvalidInput for a file that is no Parquet by its name; arrow takes every file of a folder for one."""
    if path.is_dir():
        files = (file for file in sorted(path.rglob("*")) if file.is_file() and not file.name.startswith((".", "_")))
        other = next((file for file in files if file.suffix != ".parquet"), None)
        if other is not None:
            raise InvalidInput(field, str(other), "a folder with nothing but .parquet files")
    module = {".jsonl": "json", ".json": "json", ".csv": "csv"}.get(path.suffix)
    if module:
        target = path.with_suffix(".parquet").name
        convert = f"parquet.write_table({module}.read_{module}({path.name!r}), {target!r})"
        raise InvalidInput(field, str(path), f"Parquet: from pyarrow import {module}, parquet; {convert}")


def _has(schema: Any) -> str:
    return "it has " + ", ".join(schema.names)
