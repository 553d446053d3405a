"""Rows of JSON-lines files: each line is an object, and each name has the same JSON type in all lines, or null."""

import json
from collections.abc import Iterator, Sequence
from itertools import chain
from pathlib import Path
from typing import Any

from prefect_rlhf.errors.errors import InvalidInput, refusing
from prefect_rlhf.files.foreign_file import parse_json, require_regular
from prefect_rlhf.tasks.data.stored.columns import PlainColumn

WORDS = {bool: "true or false", int: "a number", float: "a number", str: "text", list: "a list", dict: "an object"}


def read_json_lines(field: str, files: Sequence[str]) -> tuple[int, dict[str, PlainColumn]]:
    """Return the number of rows, and the columns; a name that a line lacks is None there. Blank lines are skipped.

    Raises InvalidInput, with file and line, for a line that is not a JSON object and for a name with two types.
    """
    columns: dict[str, list[Any]] = {}
    first: dict[str, tuple[str, str]] = {}  # by name: the type, and its first place
    count = 0
    for where, row in chain.from_iterable(_rows(field, file) for file in files):
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
    return count, {name: PlainColumn(values + [None] * (count - len(values))) for name, values in columns.items()}


def _rows(field: str, file: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield (file and line, object) for each line that is not blank."""
    with refusing(OSError, f"{field}.path", file, "a file that can be read"):
        require_regular(Path(file))
        with Path(file).open("rb") as lines:
            for number, line in enumerate(lines, 1):
                where = f"{file} line {number}"
                if line.strip():
                    yield where, _object(field, where, line)


def _object(field: str, where: str, line: bytes) -> dict[str, Any]:
    with refusing(ValueError, f"{field}.path", where, "a JSON object"):
        value = parse_json(line.decode("utf-8-sig"))
        if b"\\ud" in line.lower():
            json.dumps(value, ensure_ascii=False).encode()  # refuses half a surrogate pair
    if not isinstance(value, dict):
        raise InvalidInput(f"{field}.path", where, f"a JSON object, not {WORDS.get(type(value), 'null')}")
    return value
