"""A file's rows with our columns: columns made by a format, and the file's own, with turns converted to messages."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from prefect_rlhf.engines.rows import ColumnKind
from prefect_rlhf.errors.errors import InvalidInput
from prefect_rlhf.tasks.data.formats.find import Wanted, find_format, form_with_system
from prefect_rlhf.tasks.data.formats.format import ASKED
from prefect_rlhf.tasks.data.formats.found import Found, Made
from prefect_rlhf.tasks.data.formats.row import FileRow
from prefect_rlhf.tasks.data.formats.turns import CALLERS, are_turns, messages_of
from prefect_rlhf.tasks.data.stored.columns import Column
from prefect_rlhf.tasks.data.stored.stored_rows import StoredRows

VARIABLES = "chat_template_kwargs"
"""TRL's column of variables for the chat template; prompts do not have it, in TRL either."""
UNREAD = (
    *("system", "system_prompt", "history", "context", "passage", "choices", "options", "margin"),
    *("image", "images", "video", "videos", "audio", "audios"),
)
"""Columns of other libraries that would change a row: the log says that they are not read."""


@dataclass(frozen=True)
class MadeColumn:
    """A column made by a format, or with turns converted to messages, as the dataset's checks read it."""

    stored: Column
    holds_messages: bool
    kind: ColumnKind

    @property
    def message_keys(self) -> frozenset[str]:
        """The keys of the messages; `tool_calls` if a turn calls a tool."""
        calls = {"tool_calls"} if self.stored.speakers & set(CALLERS) else set()
        return frozenset({"role", "content", *self.stored.turn_keys, *calls}) if self.holds_messages else frozenset()

    @property
    def has_all_keys(self) -> bool:
        """As in the file's column."""
        return self.stored.has_all_keys

    @property
    def described(self) -> str:
        """The type of the file's column, for errors."""
        return self.stored.described


@dataclass(frozen=True)
class FormattedRows:
    """A dataset's `stored` rows with the columns that it wants.

    Every member raises InvalidInput for a file whose format is unknown or ambiguous, and for a row of another format.
    """

    stored: StoredRows
    wanted: Wanted

    @cached_property
    def found(self) -> Found:
        """The rows' format."""
        return find_format(self.stored, self.wanted)

    @property
    def field(self) -> str:
        """The dataset's name, for errors."""
        return self.stored.field

    @property
    def names(self) -> tuple[str, ...]:
        """The file's columns, without the split column."""
        return self.stored.names

    def __len__(self) -> int:
        return len(self.stored)

    def column(self, name: str) -> Column | MadeColumn:
        """Return one of our columns, or a column of the file."""
        made = self.found.makes.get(name)
        if made is None:
            column = self.stored.column(name)
            has_turns = not column.holds_messages and are_turns(column.turn_keys)
            return MadeColumn(column, holds_messages=True, kind="other") if has_turns else column
        column = self.stored.column(self.found.columns[made.parts[0]])
        kind: ColumnKind = column.kind if made.is_as_stored else "other" if made.is_messages else "text"
        return MadeColumn(column, made.is_messages, kind)

    def read(self, name: str, rows: Sequence[int]) -> list[Any]:
        """Return a column's values for some rows, with turns as messages."""
        made = self.found.makes.get(name)
        if made is not None:
            return self._make(made, rows)
        values = self.stored.read(name, rows)
        if not isinstance(self.column(name), MadeColumn):
            return values
        where, path = self.field, self.stored.path
        return [
            value if value is None else messages_of(value, f"{where} row {row} {name}", path)
            for row, value in zip(rows, values, strict=True)
        ]

    def require_text(self, name: str, allow_messages: bool = False) -> None:
        """Raise InvalidInput unless a column holds strings (or, if allowed, messages)."""
        found = self.column(name)
        if found.kind == "text" or (allow_messages and found.holds_messages):
            return
        expected = "strings, or lists of {role, content}" if allow_messages else "strings"
        raise InvalidInput(f"{self.field}.{name}", found.described, expected)

    def _make(self, made: Made, rows: Sequence[int]) -> list[Any]:
        columns, path = self.found.columns, self.stored.path
        read = {part: self.stored.read(columns[part], rows) for part in made.parts}
        return [
            made.value(FileRow(f"{self.field} row {row}", path, columns, {part: read[part][at] for part in read}))
            for at, row in enumerate(rows)
        ]

    @property
    def remark(self) -> str:
        """A log line with the rows' format and the columns that are read."""
        found, turns = self.found, ""
        if ASKED in found.columns and found.has_turns:
            (first,) = self.stored.read(found.columns[ASKED], [0])
            turns = f": {len(first)} turns in row 0" if isinstance(first, list) else ""
        if found.form == "pairs" and len(found.columns) == 2 and "prompt_column" not in self.wanted.stated:
            turns = "; the prompt is what both answers begin with"
        others = (*UNREAD, VARIABLES) if self.wanted.kind == "prompts" else UNREAD
        unread = [name for name in others if name in self.names and name not in found.columns.values()]
        not_read = f"; {' and '.join(unread)} {'is' if len(unread) == 1 else 'are'} not read" if unread else ""
        if unread and found.format is None and (form := form_with_system(self.stored, self.wanted)) is not None:
            not_read += f" (with form: {form}, the system prompt is)"
        return f"{self.field}: {self.stored.path} is read as {found.described}{turns}{self.stored.remark}{not_read}"
