"""A row as a file has it, and the messages and texts that formats make of it."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from prefect_rlhf.errors.errors import InvalidInput

ChatMessage = Mapping[str, Any]  # role, content, and perhaps calls of tools
Prompt = str | Sequence[ChatMessage]


@dataclass(frozen=True, slots=True)
class FileRow:
    """The values of a row by their part in a format, such as `input`, and the file's column of each part.

    `where` names dataset and row in errors. A part that the file lacks has no column, and its value is None.
    """

    where: str
    path: str
    columns: Mapping[str, str]
    values: Mapping[str, Any]

    def wrong(self, part: str, expected: str) -> InvalidInput:
        """Return the error about the value of a part."""
        return InvalidInput(self.place(part), self.values.get(part), f"{expected}, in {self.path}")

    def place(self, part: str) -> str:
        """Return the name of dataset, row and column in errors."""
        return f"{self.where} {self.columns.get(part, part)}"

    def text(self, part: str) -> str:
        """Return the text of a part. Raises InvalidInput if it is missing or blank."""
        value = self.values.get(part)
        if not isinstance(value, str) or not value.strip():
            raise self.wrong(part, "text that is not empty")
        return value

    def optional_text(self, part: str) -> str:
        """Return the text of a part, empty if it is missing or blank. Raises InvalidInput for another value."""
        value = self.values.get(part)
        if not isinstance(value, str | None):
            raise self.wrong(part, "text")
        return value if value and value.strip() else ""

    def system_turn(self) -> list[ChatMessage]:
        """Return the system message of the part `system`, if it has one."""
        text = self.optional_text("system")
        return [{"role": "system", "content": text}] if text else []


def decoded(value: Any) -> Any:
    """Return the value of a JSON text of an object or a list; any other value as it is.

    >>> decoded('{"a": 1}'), decoded("{a")
    ({'a': 1}, '{a')
    """
    if not isinstance(value, str) or value.lstrip()[:1] not in ("{", "["):
        return value
    try:
        return json.loads(value)
    except (ValueError, RecursionError):
        return value
