"""A row as it is in a file, and the messages and texts that formats make of it."""

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
    """A row's values by their part in a format, such as `input`, and each part's column in the file.

    `where` names dataset and row in errors. A part that the file lacks has no column, and its value is None.
    """

    where: str
    path: str
    columns: Mapping[str, str]
    values: Mapping[str, Any]

    def wrong(self, part: str, expected: str) -> InvalidInput:
        """Return the error about a part's value."""
        return InvalidInput(self.place(part), self.values.get(part), f"{expected}, in {self.path}")

    def place(self, part: str) -> str:
        """Return the names of dataset, row and column, for errors."""
        return f"{self.where} {self.columns.get(part, part)}"

    def text(self, part: str) -> str:
        """Return a part's text. Raises InvalidInput if it is missing or blank."""
        value = self.values.get(part)
        if not isinstance(value, str) or not value.strip():
            raise self.wrong(part, "text that is not empty")
        return value

    def optional_text(self, part: str) -> str:
        """Return a part's text, empty if it is missing or blank. Raises InvalidInput for another type."""
        value = self.values.get(part)
        if not isinstance(value, str | None):
            raise self.wrong(part, "text")
        return value if value and value.strip() else ""

    def system_turn(self) -> list[ChatMessage]:
        """Return the system message from the part `system`, if the row has it."""
        text = self.optional_text("system")
        return [{"role": "system", "content": text}] if text else []

    def with_system(self, messages: list[ChatMessage]) -> list[ChatMessage]:
        """Return messages after the row's system message, unless they begin with one of their own."""
        has_own = bool(messages) and messages[0]["role"] == "system"
        return messages if has_own else [*self.system_turn(), *messages]


def decoded(value: Any) -> Any:
    """Decode the JSON text of an object or a list; return any other value unchanged.

    >>> decoded('{"a": 1}'), decoded("{a")
    ({'a': 1}, '{a')
    """
    if not isinstance(value, str) or value.lstrip()[:1] not in ("{", "["):
        return value
    try:
        return json.loads(value)
    except (ValueError, RecursionError):
        return value
