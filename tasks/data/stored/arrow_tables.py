"""Columns of Parquet files, and of the Arrow files that Hugging Face `datasets` saves; the latter are memory-mapped."""

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.dataset as pds
import pyarrow.parquet as pq

from prefect_rlhf.errors.errors import InvalidInput, refusing
from prefect_rlhf.tasks.data.stored.columns import ArrowColumn

UNREADABLE = (pa.ArrowException, OSError)
ENDINGS = ".jsonl, .json, .csv or .tsv"  # of files that are no Parquet


def read_parquet(field: str, files: Sequence[str], root: str | None) -> tuple[int, dict[str, ArrowColumn]]:
    """Return how many rows Parquet files have, and their columns; columns from folder names are last.

    `root` is a folder with sub-folders that may be named `column=value`, or None. Raises InvalidInput for files that
    cannot be read or whose columns differ; so does the first access to a damaged column.
    """
    at, place = f"{field}.path", root or files[0]
    is_named = root or Path(place).suffix == ".parquet"
    right = "Parquet that can be read" if is_named else f"Parquet that can be read, or a name with {ENDINGS}"
    with refusing(UNREADABLE, at, place, right, most=80):
        schemas = [pq.read_schema(file, arrow_extensions_enabled=False) for file in files]  # as a dataset reads them
        _check_names(at, [(file, schema.names) for file, schema in zip(files, schemas, strict=True)])
        partitioning = pds.HivePartitioning.discover(infer_dictionary=True) if root else None
        dataset = pds.dataset(root or list(files), format="parquet", partitioning=partitioning)
        dataset = dataset.replace_schema(pa.unify_schemas([dataset.schema, *schemas]))  # a schema that fits all files

    def load(name: str) -> Any:
        with refusing(UNREADABLE, at, place, "whole Parquet files"):
            return _valid(dataset.to_table(columns=[name])[name])

    columns = {column.name: ArrowColumn(column.type, partial(load, column.name)) for column in dataset.schema}
    return int(dataset.count_rows()), columns


def read_saved(field: str, files: Sequence[str]) -> tuple[int, dict[str, ArrowColumn]]:
    """Return the number of rows and the columns of a folder of Arrow files written by `datasets.save_to_disk`.

    Raises InvalidInput as `read_parquet` does.
    """
    at, tables = f"{field}.path", []
    for file in files:
        with refusing(UNREADABLE, at, file, "a whole Arrow file"):
            tables.append(pa.ipc.open_stream(pa.memory_map(file)).read_all())
    _check_names(at, [(file, table.schema.names) for file, table in zip(files, tables, strict=True)])
    if not tables:
        return 0, {}
    with refusing(pa.ArrowException, at, files[0], "files of the same types"):
        whole = pa.concat_tables(tables, promote_options="default")

    def load(name: str) -> Any:
        with refusing(UNREADABLE, at, files[0], "whole Arrow files"):
            return _valid(whole[name])

    columns = {column.name: ArrowColumn(column.type, partial(load, column.name)) for column in whole.schema}
    return int(whole.num_rows), columns


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
