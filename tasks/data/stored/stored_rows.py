"""Columns of a dataset's split in any storage format, read once and checked before the run uses any resource."""

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from prefect_rlhf.errors.errors import InvalidInput, NotUsed
from prefect_rlhf.tasks.data.stored.arrow_tables import read_parquet, read_saved
from prefect_rlhf.tasks.data.stored.columns import Column
from prefect_rlhf.tasks.data.stored.delimited import read_delimited
from prefect_rlhf.tasks.data.stored.files import find_files
from prefect_rlhf.tasks.data.stored.generated_rows import generate_rows, is_generated
from prefect_rlhf.tasks.data.stored.json_files import read_json

DEFAULT_SPLIT_COLUMN, DEFAULT_SPLIT = "split", "train"


@dataclass(frozen=True, slots=True)
class Table:
    """All stored rows: their number, and the columns in the order of their first occurrence.

    `key` is the key of the list of rows, if a file is an object with such a list. `split` is the rows' split, if the
    names of folders or files say it.
    """

    num_rows: int
    columns: Mapping[str, Column]
    key: str = ""
    split: str = ""


@dataclass(frozen=True)
class StoredRows:
    """The rows of a dataset.

    Errors name the parameter `field`, and the setting in `settings` that names a column. Rows are numbered within their
    split, in the order of the files. Columns that were read are cached.
    """

    field: str
    path: str
    split_column: str | None = None
    split: str = DEFAULT_SPLIT
    settings: Mapping[str, str] = dataclasses.field(default_factory=dict, hash=False)

    @property
    def names(self) -> tuple[str, ...]:
        """The columns, without the split column. All members raise InvalidInput for data that cannot be read."""
        table, split_column = self._opened
        return tuple(name for name in table.columns if name != split_column)

    @property
    def remark(self) -> str:
        """Part of a log line: the key of the list that has the rows, and the split that names say; else empty."""
        table, _ = self._opened
        of_key = f"; the rows are the list {table.key!r} of the file" if table.key else ""
        return of_key + (f"; only its split {table.split}" if table.split else "")

    def __len__(self) -> int:
        return len(self._rows)

    def column(self, path: str, field: str | None = None) -> Column:
        """Return a column, or a struct's field such as `reward_model.ground_truth`; errors name `field`."""
        if path not in self._columns:
            self._columns[path] = self._find(path, field or f"{self.field}.{self.settings.get(path, path)}")
        return self._columns[path]

    def read(self, path: str, rows: Sequence[int] | None = None) -> list[Any]:
        """Return plain values of `rows`, by default of all rows."""
        numbers = self._rows
        rows = range(len(numbers)) if rows is None else rows
        if isinstance(numbers, range) and isinstance(rows, range):  # neighbours, which are read faster
            return self.column(path).read(numbers[rows.start : rows.stop : rows.step])
        return self.column(path).read([numbers[row] for row in rows])

    def _find(self, path: str, field: str) -> Column:
        columns = self._opened[0].columns
        name = _first_name(path, columns)
        if name is None:
            raise InvalidInput(field, path, f"a column of {self.path}; it has {', '.join(columns)}")
        column = columns[name]
        while name != path:
            part = _first_name(path[len(name) + 1 :], column.fields)
            if part is None:
                has = f"it has {', '.join(column.fields)}" if column.fields else f"it is {column.described}"
                raise InvalidInput(field, path, f"a field of {name!r} in {self.path}; {has}")
            column, name = column.field(part), f"{name}.{part}"
        return column

    @cached_property
    def _columns(self) -> dict[str, Column]:
        return {}

    @cached_property
    def _opened(self) -> tuple[Table, str | None]:
        """The table, and its split column if it has one."""
        table, split_column = self._open()
        if not table.num_rows:
            raise InvalidInput(f"{self.field}.path", self.path, "a file with at least one row")
        if not table.columns:
            raise InvalidInput(f"{self.field}.path", self.path, "rows with at least one column")
        if split_column is not None and split_column not in table.columns:
            expected = f"a column of {self.path}, or empty to read all rows; it has {', '.join(table.columns)}"
            raise InvalidInput(f"{self.field}.split_column", split_column, expected)
        return table, split_column

    def _open(self) -> tuple[Table, str | None]:
        if is_generated(self.path):
            generated = Table(*generate_rows(self.field, self.path))
            if self.split != DEFAULT_SPLIT:
                expected = f"{DEFAULT_SPLIT}; another seed in the path generates other rows"
                raise InvalidInput(f"{self.field}.split", self.split, expected)
            self._check_no_split_column("the path determines the rows")
            return generated, None
        found = find_files(self.field, self.path, self.split)
        if found.format == "json":
            table = Table(*read_json(self.field, found.files))
        elif found.format == "delimited":
            table = Table(*read_delimited(self.field, found.files))
        elif found.format == "parquet":
            table = Table(*read_parquet(self.field, found.files, found.folder))
        else:
            table = Table(*read_saved(self.field, found.files))
        if found.split is None:
            return table, self.split_column
        named = "folders" if found.format == "saved" else "files' names"
        self._check_no_split_column(f"the {named} of {self.path} are its splits")
        return replace(table, split=found.split), None

    def _check_no_split_column(self, why: str) -> None:
        """Raise InvalidInput for a named split column if the source cannot have such a column."""
        if self.split_column not in (None, DEFAULT_SPLIT_COLUMN):
            raise NotUsed(f"{self.field}.split_column", self.split_column, why)

    @cached_property
    def _rows(self) -> Sequence[int]:
        """The numbers of the split's rows within all rows."""
        table, split_column = self._opened
        if split_column is None:
            return range(table.num_rows)
        splits = table.columns[split_column]
        rows = splits.rows_with(self.split)
        if not rows:
            names = ", ".join(sorted({str(split) for split in splits.read(range(table.num_rows))})[:8])
            raise InvalidInput(f"{self.field}.split", self.split, f"a split of {self.path}: {names}")
        return rows


def _first_name(path: str, names: Iterable[str]) -> str | None:
    """Return the name that a path such as `reward_model.ground_truth` begins with; a name may have dots of its own."""
    fitting = (name for name in names if path == name or path.startswith(f"{name}."))
    return max(fitting, key=len, default=None)
