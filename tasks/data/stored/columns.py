"""A column of a dataset as plain Python values by row number, stored as Arrow data or as Python values."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Protocol

import pyarrow as pa
import pyarrow.compute as pc

from prefect_rlhf.engines.rows import ColumnKind
from prefect_rlhf.errors.errors import refusing
from prefect_rlhf.files.foreign_file import parse_json

MAY_BE_NULL = ("default", "const")
"""Keys of a JSON schema whose value may be null. Under any other key a null is only a filled gap."""


class Column(Protocol):
    """A named column: its values in the rows' order, None for rows without a value."""

    @property
    def kind(self) -> ColumnKind:
        """Numbers and Booleans; strings; or anything else: lists, structs, dates, only nulls."""
        ...

    @property
    def holds_messages(self) -> bool:
        """Whether the values are chats: lists of {role, content}."""
        ...

    @property
    def message_keys(self) -> frozenset[str]:
        """The keys that have a value in some message, if the values are chats."""
        ...

    @property
    def turn_keys(self) -> frozenset[str]:
        """The keys of the first object, if the values are objects or lists of objects."""
        ...

    @property
    def speakers(self) -> frozenset[str]:
        """The names in `from` of all objects in the lists."""
        ...

    @property
    def has_all_keys(self) -> bool:
        """Whether each object has every key of its type, with None for missing keys."""
        ...

    @property
    def described(self) -> str:
        """The type as text, for errors."""
        ...

    @property
    def fields(self) -> tuple[str, ...]:
        """The names of the fields inside, if the values are structs or objects."""
        ...

    def field(self, name: str) -> Column:
        """Return the column of one of the `fields`."""
        ...

    def read(self, rows: Sequence[int]) -> list[Any]:
        """Return the values of rows; the caller may change them."""
        ...

    def rows_with(self, text: str) -> Sequence[int]:
        """Return the numbers of the rows whose value is a text."""
        ...


@dataclass(frozen=True)
class ArrowColumn:
    """Arrow data, in memory or mapped from a file; `load` runs at the first access to a value."""

    type: Any  # pyarrow.DataType
    load: Callable[[], Any]

    @cached_property
    def values(self) -> Any:
        """The data as a pyarrow.ChunkedArray; Python has no nanoseconds, so times have microseconds."""
        values = self.load()
        type_ = _in_microseconds(values.type)
        return values if type_ == values.type else values.cast(type_, safe=False)

    @property
    def kind(self) -> ColumnKind:
        """The kind of the type; for a dictionary, the kind of its entries."""
        type_ = decoded(self.type)
        if pa.types.is_boolean(type_) or pa.types.is_integer(type_) or pa.types.is_floating(type_):
            return "number"
        return "text" if is_text(type_) else "other"

    @property
    def holds_messages(self) -> bool:
        """Whether the type is a list of structs with role and content."""
        return is_messages(self.type)

    @property
    def message_keys(self) -> frozenset[str]:
        """The fields of messages that are not all null or empty. Arrow looks, because there may be millions of rows."""
        turns = pc.list_flatten(self.values) if self.holds_messages else None
        fields = () if turns is None else self.type.value_type
        return frozenset(each.name for each in fields if _has_value(pc.struct_field(turns, each.name)))

    @property
    def turn_keys(self) -> frozenset[str]:
        """The fields of the structs, also of structs in lists."""
        type_ = self.type.value_type if _is_list(self.type) else self.type
        return frozenset(field.name for field in type_) if pa.types.is_struct(type_) else frozenset()

    @property
    def speakers(self) -> frozenset[str]:
        """The values of `from` in the structs of all lists."""
        if not _is_list(self.type) or "from" not in self.turn_keys:
            return frozenset()
        named = pc.unique(pc.struct_field(pc.list_flatten(self.values), "from"))
        return frozenset(name for name in named.to_pylist() if isinstance(name, str))

    @property
    def has_all_keys(self) -> bool:
        """True, because Arrow's structs have all fields."""
        return True

    @property
    def described(self) -> str:
        """The Arrow type."""
        return str(decoded(self.type))

    @property
    def fields(self) -> tuple[str, ...]:
        """The fields of a struct."""
        return tuple(field.name for field in self.type) if pa.types.is_struct(self.type) else ()

    def field(self, name: str) -> ArrowColumn:
        """Return a field of all structs as a column."""
        return ArrowColumn(self.type.field(name).type, lambda: pc.struct_field(self.values, name))

    def read(self, rows: Sequence[int]) -> list[Any]:
        """Return the values of rows. Neighbours are read together; others one by one, since `take` merges chunks."""
        stored = self.values
        with refusing((ValueError, OverflowError), "a column", self.described, "values that Python has", most=80):
            if isinstance(rows, range) and rows.step == 1:
                values = stored.slice(rows.start, len(rows)).to_pylist(maps_as_pydicts="lossy")
            else:
                values = [stored[row].as_py(maps_as_pydicts="lossy") for row in rows]
        return [_from_json(self.type, value) for value in values] if "json" in str(self.type) else values

    def rows_with(self, text: str) -> Sequence[int]:
        """Return the numbers of the rows with this text. Arrow compares, because there may be millions of rows."""
        if not is_text(self.type):
            return [row for row, value in enumerate(self.read(range(len(self.values)))) if value == text]
        rows: list[int] = pc.indices_nonzero(pc.equal(self.values.cast(pa.large_string()), text)).to_pylist()
        return rows


@dataclass(frozen=True)
class PlainColumn:
    """Python values of one JSON type, or null."""

    values: Sequence[Any]

    @cached_property
    def kind(self) -> ColumnKind:
        """The common kind of all values except null."""
        types = {type(value) for value in self.values if value is not None}
        if types and types <= {bool, int, float}:
            return "number"
        return "text" if types == {str} else "other"

    @cached_property
    def holds_messages(self) -> bool:
        """Whether all values are lists of objects with role and content: text, parts or null."""
        chats = [value for value in self.values if value is not None]
        return bool(chats) and all(_is_chat(chat) for chat in chats)

    @cached_property
    def message_keys(self) -> frozenset[str]:
        """The keys of all messages, without those that are always null or empty."""
        chats = self.values if self.holds_messages else ()
        turns = (turn for chat in chats if chat is not None for turn in chat)
        return frozenset(key for turn in turns for key, value in turn.items() if value is not None and value != [])

    @cached_property
    def turn_keys(self) -> frozenset[str]:
        """The keys of the first object, also of an object in a list."""
        first = next((value for value in self.values if value), None)
        turn = first[0] if isinstance(first, list) else first
        return frozenset(turn) if isinstance(turn, Mapping) else frozenset()

    @cached_property
    def speakers(self) -> frozenset[str]:
        """The values of `from` in the objects of all lists."""
        turns = (turn for value in self.values if isinstance(value, list) for turn in value)
        named = (turn.get("from") for turn in turns if isinstance(turn, Mapping))
        return frozenset(name for name in named if isinstance(name, str))

    @cached_property
    def has_all_keys(self) -> bool:
        """Whether all objects at the same place have the same keys, some of them None: Arrow wrote these lines, as
        `to_json` of `datasets` does. Otherwise each object has only its author's keys.
        """
        return _has_gap(self.values) and _have_same_keys(self.values)

    @property
    def described(self) -> str:
        """The values' types by their Python names."""
        return " or ".join(sorted({type(value).__name__ for value in self.values if value is not None})) or "null"

    @cached_property
    def fields(self) -> tuple[str, ...]:
        """The keys of all objects."""
        return tuple(dict.fromkeys(key for value in self.values if isinstance(value, Mapping) for key in value))

    def field(self, name: str) -> PlainColumn:
        """Return a key's values as a column; None for objects without the key."""
        return PlainColumn([value.get(name) if isinstance(value, Mapping) else None for value in self.values])

    def read(self, rows: Sequence[int]) -> list[Any]:
        """Return copies of the rows' values."""
        return [deepcopy(self.values[row]) for row in rows]

    def rows_with(self, text: str) -> Sequence[int]:
        """Return the numbers of the rows whose value is a text."""
        return [row for row, value in enumerate(self.values) if value == text]


def is_text(type_: Any) -> bool:
    """Return whether an Arrow type is a string, in any storage format."""
    type_ = decoded(type_)
    return bool(pa.types.is_string(type_) or pa.types.is_large_string(type_) or pa.types.is_string_view(type_))


def decoded(type_: Any) -> Any:
    """Return an Arrow type's value type: for a dictionary (a pandas category), the type of its entries."""
    return type_.value_type if pa.types.is_dictionary(type_) else type_


def is_messages(type_: Any) -> bool:
    """Return whether an Arrow type is list<struct<role: string, content: ...>>.

    Content is a string, a list of parts, JSON, or null.
    """
    if not _is_list(type_) or not pa.types.is_struct(type_.value_type):
        return False
    fields = {field.name: field.type for field in type_.value_type}
    return {"role", "content"} <= set(fields) and is_text(fields["role"]) and _is_content(fields["content"])


def _is_content(type_: Any) -> bool:
    has_parts = _is_list(type_) and pa.types.is_struct(type_.value_type)
    return is_text(type_) or has_parts or pa.types.is_null(type_) or isinstance(type_, pa.JsonType)


def _is_list(type_: Any) -> bool:
    return bool(pa.types.is_list(type_) or pa.types.is_large_list(type_) or pa.types.is_fixed_size_list(type_))


def _has_value(values: Any) -> bool:
    """Whether a ChunkedArray has a value that is neither null nor an empty list."""
    has_value = pc.greater(pc.list_value_length(values), 0) if _is_list(values.type) else values.is_valid()
    return bool(pc.any(has_value).as_py())


def _in_microseconds(type_: Any) -> Any:
    """Return a type with microseconds in place of nanoseconds, also inside lists and structs.

    >>> _in_microseconds(pa.list_(pa.timestamp("ns")))
    ListType(list<item: timestamp[us]>)
    """
    if pa.types.is_timestamp(type_) and type_.unit == "ns":
        return pa.timestamp("us", type_.tz)
    if pa.types.is_duration(type_) and type_.unit == "ns":
        return pa.duration("us")
    if pa.types.is_time64(type_) and type_.unit == "ns":
        return pa.time64("us")
    if pa.types.is_list(type_) or pa.types.is_large_list(type_):
        make = pa.list_ if pa.types.is_list(type_) else pa.large_list
        return make(type_.value_field.with_type(_in_microseconds(type_.value_type)))
    if pa.types.is_fixed_size_list(type_):
        return pa.list_(type_.value_field.with_type(_in_microseconds(type_.value_type)), type_.list_size)
    if pa.types.is_struct(type_):
        return pa.struct([each.with_type(_in_microseconds(each.type)) for each in type_])
    return type_


def _have_same_keys(values: Sequence[Any]) -> bool:
    """Whether all objects have the same keys, and so have the objects inside them that are at the same place."""
    objects = [value for value in values if isinstance(value, Mapping)]
    inside = [each for value in values if isinstance(value, list) for each in value]
    keys = objects[0].keys() if objects else ()
    if any(each.keys() != keys for each in objects):
        return False
    return (not inside or _have_same_keys(inside)) and all(
        _have_same_keys([each[key] for each in objects]) for key in keys
    )


def _has_gap(values: Iterable[Any]) -> bool:
    """Whether any object in the values has a None, apart from keys that may be null in a JSON schema."""
    return any(
        _has_gap(value)
        if isinstance(value, list)
        else any(each is None and key not in MAY_BE_NULL for key, each in value.items()) or _has_gap(value.values())
        for value in values
        if isinstance(value, list | Mapping)
    )


def _is_chat(value: Any) -> bool:
    turns = value if isinstance(value, list) else [None]
    return all(
        isinstance(turn, Mapping)
        and isinstance(turn.get("role", 0), str | None)
        and isinstance(turn.get("content", None if turn.get("tool_calls") else 0), str | list | None)
        for turn in turns
    )


def _from_json(type_: Any, value: Any) -> Any:
    """Decode the parts of a value that Arrow stores as JSON text, as `datasets` does with objects of mixed types."""
    if value is None:
        return None
    if isinstance(type_, pa.JsonType):
        with refusing(ValueError, "a column of JSON", value, "JSON", most=80):
            return parse_json(value)
    if _is_list(type_):
        return [_from_json(type_.value_type, item) for item in value]
    if pa.types.is_struct(type_):
        return {field.name: _from_json(field.type, value[field.name]) for field in type_}
    return value
