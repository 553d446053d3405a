"""Rows of JSON files: an object per line, or a list of objects. A name has the same JSON type in all rows, or null.

A `.json` file may be a list of objects, or an object with such a list, as some libraries write.
"""

import json
from collections.abc import Iterator, Sequence
from itertools import chain
from pathlib import Path
from typing import Any

from prefect_rlhf.errors.errors import InvalidInput, refusing
from prefect_rlhf.files.foreign_file import MOST_BYTES, parse_json
from prefect_rlhf.tasks.data.stored.columns import PlainColumn
from prefect_rlhf.tasks.data.stored.compressed import READING, opened, uncompressed

BYTE_ORDER_MARK = b"\xef\xbb\xbf"
LISTS = ("data", "rows", "examples", "instances", "items", "records", "samples", "train")
"""Keys under which an object in a file may have the rows."""
WORDS = {bool: "true or false", int: "a number", float: "a number", str: "text", list: "a list", dict: "an object"}


def read_json(field: str, files: Sequence[str]) -> tuple[int, dict[str, PlainColumn], str]:
    """Return the number of rows, the columns and, for objects that contain a list of rows, the key of that list.

    A row without a name has None there. Blank lines are skipped. Raises InvalidInput, with file and line or item, for a
    row that is not a JSON object and for a name with two types.
    """
    columns: dict[str, list[Any]] = {}
    first: dict[str, tuple[str, str]] = {}  # by name: the type, and its first place
    count, keys = 0, set[str]()
    for where, row, key in chain.from_iterable(_rows(field, file) for file in files):
        keys.add(key)
        for name, value in row.items():
            if value is not None:
                word = WORDS[type(value)]
                expected, seen_first = first.setdefault(name, (word, where))
                if word != expected:
                    raise InvalidInput(f"{field}.{name}", f"{word} in {where}", f"{expected}, as in {seen_first}")
            values = columns.setdefault(name, [])
            values += [None] * (count - len(values))
            values.append(value)
        count += 1
    whole = {name: PlainColumn(values + [None] * (count - len(values))) for name, values in columns.items()}
    return count, whole, " and ".join(sorted(filter(None, keys)))


def _rows(field: str, file: str) -> Iterator[tuple[str, dict[str, Any], str]]:
    """Yield (file and place, object, key of the list) for each row of a file."""
    is_json = uncompressed(Path(file)).suffix == ".json"
    with refusing(READING, f"{field}.path", file, "a file that can be read"):
        listed = _listed(field, file) if is_json else None
        if listed is not None:
            for number, value in enumerate(listed[1]):
                yield (where := f"{file} item {number}"), _checked(field, where, value), listed[0]
            return
        with opened(Path(file)) as lines:
            for number, line in enumerate(lines, 1):
                where = f"{file} line {number}"
                if line.strip():
                    yield where, _object(field, where, line, is_json), ""


def _listed(field: str, file: str) -> tuple[str, list[Any]] | None:
    """Return the list of rows that a .json file is or has under a key of LISTS, with the key; None for JSON lines.

    A file of a single other object has a row. Raises InvalidInput for a list that cannot be read.
    """
    with opened(Path(file)) as start:
        first = next((line for line in start if line.strip()), b"").lstrip(BYTE_ORDER_MARK).strip()
        is_list, is_last = first.startswith(b"["), not any(line.strip() for line in start)
    if not is_list and not (first.startswith(b"{") and (is_last or not _is_object(first))):
        return None
    with opened(Path(file)) as whole:
        content = whole.read(MOST_BYTES)
        if len(content) == MOST_BYTES:
            expected = f"a list of less than {MOST_BYTES >> 30} GiB, or JSON lines: a row in each line"
            raise InvalidInput(f"{field}.path", file, expected)
    try:
        value = _value(content)
    except ValueError as error:
        if is_list:
            raise InvalidInput(f"{field}.path", file, f"a JSON list of objects ({error!s:.120})") from error
        return None  # the line that is no object is refused
    if isinstance(value, list):
        return "", value
    lists = [(key, value[key]) for key in LISTS if isinstance(value.get(key), list)]
    if len(lists) > 1:
        keys = " and ".join(key for key, _ in lists)
        raise InvalidInput(f"{field}.path", file, f"a single list of rows; this file has {keys}")
    return lists[0] if lists else ("", [value])


def _is_object(line: bytes) -> bool:
    try:
        return isinstance(_value(line), dict)
    except ValueError:
        return False


def _value(content: bytes) -> Any:
    """Return the value of a JSON text. Raises ValueError, also for half a surrogate pair."""
    value = parse_json(content.decode("utf-8-sig"))
    if b"\\ud" in content.lower():
        json.dumps(value, ensure_ascii=False).encode()
    return value


def _object(field: str, where: str, line: bytes, is_json: bool) -> dict[str, Any]:
    hint = "" if is_json or not line.startswith(b"[") else "; a file that is one list is named .json"
    right = "a JSON object" if is_json else f"a JSON object alone on its line{hint}"
    with refusing(ValueError, f"{field}.path", where, right):
        value = _value(line)
    return _checked(field, where, value, hint)


def _checked(field: str, where: str, value: Any, hint: str = "") -> dict[str, Any]:
    if not isinstance(value, dict):
        raise InvalidInput(f"{field}.path", where, f"a JSON object, not {WORDS.get(type(value), 'null')}{hint}")
    return value
