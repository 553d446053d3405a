"""Columns of text files with commas (`.csv`) or tabs (`.tsv`), named in the first line."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pyarrow as pa
from pyarrow import csv

from prefect_rlhf.errors.errors import InvalidInput, refusing
from prefect_rlhf.tasks.data.stored.columns import ArrowColumn
from prefect_rlhf.tasks.data.stored.compressed import READING, opened, uncompressed

DELIMITERS = {".csv": ",", ".tsv": "\t"}


def read_delimited(field: str, files: Sequence[str]) -> tuple[int, dict[str, ArrowColumn]]:
    """Return the number of rows, and the columns as numbers, Booleans or text. Text may contain line breaks.

    Raises InvalidInput for files that cannot be read, or that have different columns.
    """
    at = f"{field}.path"
    tables = [_table(at, file) for file in files]
    for file, table in zip(files, tables, strict=True):
        if set(table.column_names) != set(tables[0].column_names):
            differing = ", ".join(sorted(set(table.column_names) ^ set(tables[0].column_names)))
            raise InvalidInput(at, file, f"the same columns as {files[0]}, which differ in {differing}")
    with refusing(pa.ArrowException, at, files[0], "files whose columns have the same types"):
        whole = pa.concat_tables(tables, promote_options="default")
    columns = {column.name: ArrowColumn(column.type, partial(whole.column, column.name)) for column in whole.schema}
    return int(whole.num_rows), columns


def _table(field: str, file: str) -> Any:
    with refusing(READING, field, file, "rows of the same number of fields, with names in the first line"):
        table = _read(Path(file), {})
        times = [column.name for column in table.schema if pa.types.is_temporal(column.type)]
        table = _read(Path(file), dict.fromkeys(times, pa.string())) if times else table  # their text, as written
    if other := [column.name for column in table.schema if pa.types.is_binary(column.type)]:
        raise InvalidInput(field, file, f"text in UTF-8; {other[0]!r} has bytes of another encoding")
    twins = [name for name in table.column_names if table.column_names.count(name) > 1]
    if twins:
        raise InvalidInput(field, file, f"columns with different names; {twins[0]!r} occurs twice")
    return table


def _read(file: Path, types: Mapping[str, Any]) -> Any:
    parse = csv.ParseOptions(delimiter=DELIMITERS[uncompressed(file).suffix], newlines_in_values=True)
    with opened(file) as content:
        return csv.read_csv(content, parse_options=parse, convert_options=csv.ConvertOptions(column_types=types))
