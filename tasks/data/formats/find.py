"""Finds a file's format by the names and types of its columns, and by the first row if two formats fit.

A file with our own columns of prompts, pairs or rated answers is read as it is. An ambiguous format is not guessed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import product

from prefect_rlhf.errors.errors import InvalidInput, Missing, NotUsed
from prefect_rlhf.tasks.data.formats.format import ANSWER, ASKED, LABEL, SYSTEM, TOOLS, Format, Kind, Shape
from prefect_rlhf.tasks.data.formats.found import Found
from prefect_rlhf.tasks.data.formats.table import FORMATS
from prefect_rlhf.tasks.data.formats.turns import are_turns
from prefect_rlhf.tasks.data.stored.columns import Column
from prefect_rlhf.tasks.data.stored.stored_rows import StoredRows

LOOKED_AT = 1000  # rows: so many are read to see whether rows of another format follow
WORDS: Mapping[str, str] = {"number": "numbers", "text": "text"}
SHAPES: Mapping[Shape, str] = {
    "text": "text",
    "turns": "a list of turns in each row, such as {from, value} or {role, content}",
    "any": "text or turns",
}
"""How messages name kinds and shapes of a column."""


@dataclass(frozen=True)
class Wanted:
    """A dataset's expectations."""

    kind: Kind
    own: Mapping[str, tuple[str, ...]]
    """Our own forms with their columns, such as `prompt` and `completion`."""
    otherwise: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """How a file is read that fits no format."""
    stated: Mapping[str, str | None] = field(default_factory=dict)
    """Settings that name columns; with them, no format is looked for."""
    form: str | None = None
    """The setting of that name."""
    tools_column: str | None = None
    """It may hold tool schemas."""

    @property
    def formats(self) -> tuple[Format, ...]:
        """The formats of other libraries that can provide this kind of dataset."""
        return tuple(format for format in FORMATS if self.kind in format.kinds)


def find_format(rows: StoredRows, wanted: Wanted) -> Found:
    """Return the format of the rows. Raises InvalidInput if the columns fit several formats, or not the stated
    format.
    """
    if wanted.form is not None and wanted.form not in wanted.own:
        return _stated_format(rows, wanted, wanted.form)
    if wanted.form is not None:
        return _with_stated(rows, wanted, _own(rows, wanted, wanted.form))
    if wanted.stated:
        names = wanted.stated.values()
        forms = [form for form, columns in wanted.own.items() if set(columns) & set(names)] or list(wanted.own)
        return _with_stated(rows, wanted, _one(rows, [_own(rows, wanted, form) for form in forms]))
    own = [_own(rows, wanted, form) for form, names in wanted.own.items() if set(names) <= set(rows.names)]
    if own and wanted.kind != "chats":  # they have the names that all libraries give to prompts, pairs and answers
        return own[0]
    others = [found for format in wanted.formats for found in _fits(rows, format, wanted)]
    found = [*own, *_widest(others)]
    if found:
        return _one(rows, found)
    if wanted.kind == "answers" and {"chosen", "rejected"} <= set(rows.names):
        expected = "a row for each answer, with its completion and label; rlhf/dpo learns from pairs"
        raise InvalidInput(rows.field, f"pairs (chosen, rejected) in {rows.path}", expected)
    last = next((form for form, names in wanted.own.items() if names[-1] in rows.names), None)
    if last is None and (nearly := _nearly(rows, wanted)) is not None:
        raise nearly
    if wanted.kind == "chats" and last is None:
        raise _unknown(rows, wanted)
    form = last or next(iter(wanted.otherwise or wanted.own))
    return Found(form, wanted.kind, {name: name for name in (wanted.otherwise or wanted.own)[form]})


def _own(rows: StoredRows, wanted: Wanted, form: str) -> Found:
    known = {*rows.names, *wanted.stated.values()}  # a stated name may be a field of a struct, or wrong
    return Found(form, wanted.kind, {name: name for name in wanted.own[form] if name in known})


def _with_stated(rows: StoredRows, wanted: Wanted, own: Found) -> Found:
    """Return one of our own forms. Raises NotUsed for a stated column that this form does not read."""
    for setting, column in wanted.stated.items():
        if column is not None and column not in own.columns:
            columns = " and ".join(own.columns) or "no column of the file"
            why = f"form is {own.form}" if wanted.form else f"{rows.path} is read as {own.form}"
            raise NotUsed(f"{rows.field}.{setting}", column, f"{why}, which reads {columns}")
    return own


def _stated_format(rows: StoredRows, wanted: Wanted, form: str) -> Found:
    """Return the format that the setting `form` names."""
    for setting, column in wanted.stated.items():
        raise NotUsed(f"{rows.field}.{setting}", column, f"form is {form}, which reads its own columns")
    format = next(one for one in wanted.formats if one.form == form)
    found = _fits(rows, format, wanted)
    if not found:
        lacks = f"{form} needs {needs(format, wanted.kind)}, and {rows.path} has {', '.join(rows.names)}"
        raise InvalidInput(f"{rows.field}.form", form, f"a form of the file: {lacks}")
    return _one(rows, found)


def form_with_system(rows: StoredRows, wanted: Wanted) -> str | None:
    """Return the form that would read a file's column of system prompts; None without such a column."""
    fitting = (one for format in wanted.formats for one in _fits(rows, format, wanted))
    return next((one.form for one in fitting if SYSTEM in one.columns), None)


def needs(format: Format, kind: Kind) -> str:
    """Return the columns that a format needs, as text."""
    return " and ".join(" or ".join(part.names) for part in format.needs(kind).values())


def _fits(rows: StoredRows, format: Format, wanted: Wanted) -> list[Found]:
    """Return each way in which a file's columns fit a format: a part may have several columns."""
    parts = format.needs(wanted.kind)
    choices = [_columns(rows, part.names, part.holds) for part in parts.values()]
    others = {name: _columns(rows, part.names, part.holds) for name, part in format.others.items()}
    further = {name: columns[0] for name, columns in others.items() if columns}
    if format.reads_tools and wanted.tools_column in rows.names:
        further[TOOLS] = str(wanted.tools_column)
    fitting = []
    for chosen in product(*choices):
        columns = dict(zip(parts, chosen, strict=True)) | {
            name: column for name, column in further.items() if column not in chosen
        }
        has_turns = holds(rows.column(columns[ASKED]), "turns")
        fitting.append(Found(format.form, wanted.kind, columns, format, has_turns))
    return fitting


def _columns(rows: StoredRows, names: Sequence[str], shape: Shape) -> list[str]:
    """Return the columns of a file that have one of the names and hold the shape."""
    return [name for name in names if name in rows.names and holds(rows.column(name), shape)]


def holds(column: Column, shape: Shape) -> bool:
    """Whether a column holds text, or turns of conversations."""
    is_text, has_turns = column.kind == "text", are_turns(column.turn_keys)
    return {"text": is_text, "turns": has_turns, "any": True}[shape]


def _widest(found: Sequence[Found]) -> list[Found]:
    """Return the fits without those that read a part of the columns of another: Alpaca's input is no question."""
    columns = [set(one.columns.values()) for one in found]
    return [one for one, own in zip(found, columns, strict=True) if not any(own < other for other in columns)]


def _one(rows: StoredRows, found: Sequence[Found]) -> Found:
    """Return the only fit. Raises InvalidInput for several fits, unless the first row decides."""
    if len(found) == 1:
        return found[0]
    first = _by_first_row(rows, found)
    if first is not None:
        return first
    forms = list(dict.fromkeys(one.form for one in found))
    if len(forms) > 1:
        fits = " and ".join(one.described for one in found)
        raise Missing(f"{rows.field}.form", f"{' or '.join(forms)}: {rows.path} fits {fits}")
    part = next(part for part in (ASKED, ANSWER) if len({one.columns.get(part) for one in found}) > 1)
    names = " or ".join(dict.fromkeys(str(one.columns[part]) for one in found))
    setting = "prompt_column" if part == ASKED else "completion_column"
    raise Missing(f"{rows.field}.{setting}", f"{names}: {rows.path} has both")


def _by_first_row(rows: StoredRows, found: Sequence[Found]) -> Found | None:
    """Return the only fit of the first row's values, or None if the first rows have values of several.

    Raises InvalidInput for a row of another format among the first rows.
    """
    names = dict.fromkeys(name for one in found for name in _needed(one))
    some = range(min(len(rows), LOOKED_AT))
    values = {name: rows.read(name, some) for name in names}

    def fitting(row: int) -> list[Found]:
        return [one for one in found if all(values[name][row] is not None for name in _needed(one))]

    first = fitting(0)
    if len(first) != 1:
        return None
    for row in some:
        if first[0] not in fitting(row):
            seen = ", ".join(name for name in names if values[name][row] is not None) or "no value"
            expected = f"{', '.join(_needed(first[0]))}, as in row 0: all rows of {rows.path} must have the same format"
            raise InvalidInput(f"{rows.field} row {row}", seen, expected)
    return first[0]


def _needed(one: Found) -> list[str]:
    """Return the columns of a fit that have a value in every row."""
    if one.format is None:
        return list(one.columns.values())
    return [one.columns[part] for part in one.format.needs(one.kind)]


def _nearly(rows: StoredRows, wanted: Wanted) -> InvalidInput | None:
    """Return the error about the only part of a format that a file has with other content, or about a label that it
    lacks; None if no format is so near.
    """
    for format in wanted.formats:
        parts = format.needs(wanted.kind)
        lacks = [(name, part) for name, part in parts.items() if not _columns(rows, part.names, part.holds)]
        if len(lacks) != 1:
            continue
        ((name, part),) = lacks
        column = next((each for each in part.names if each in rows.names), None)
        if column is not None:
            found = rows.column(column)
            seen = WORDS.get(found.kind, found.described)
            right = "text (in JSON lines, quote the numbers)" if found.kind == "number" else SHAPES[part.holds]
            return InvalidInput(f"{rows.field}.{column}", seen, f"{right}, in {rows.path} as in {format.title}")
        if name == LABEL:
            needed = f"{' or '.join(part.names)} beside those of {format.title}; it has {', '.join(rows.names)}"
            return InvalidInput(f"{rows.field}.path", rows.path, f"a file with a column {needed}")
    return None


def _unknown(rows: StoredRows, wanted: Wanted) -> InvalidInput:
    known = [" and ".join(names) for names in wanted.own.values()]
    for format in wanted.formats:
        parts = format.needs(wanted.kind).values()
        known.append(f"{' and '.join(part.names[0] for part in parts)} ({format.title})")
    settings = "or their names in messages_column and so on"
    expected = f"a file with columns {', '.join(known)}, {settings}; it has {', '.join(rows.names)}"
    return InvalidInput(f"{rows.field}.path", rows.path, expected)
