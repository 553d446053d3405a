"""A format found in a file: the file's columns, and our columns that it makes of them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from prefect_rlhf.tasks.data.formats.format import ANSWER, ASKED, LABEL, OWN_TITLES, SYSTEM, Format, Kind
from prefect_rlhf.tasks.data.formats.row import FileRow, Prompt


@dataclass(frozen=True, slots=True)
class Made:
    """One of our columns, made by a format: the parts it reads, its value, and whether that is messages.

    `is_as_stored` means that the value is the file's, of any type.
    """

    parts: tuple[str, ...]
    value: Callable[[FileRow], Any]
    is_messages: bool
    is_as_stored: bool = False


@dataclass(frozen=True)
class Found:
    """How to read a file's rows: by another library's `format`, or as they are if that is None.

    `form` is its name in settings. `columns` maps the format's parts to the file's columns.
    """

    form: str
    kind: Kind
    columns: Mapping[str, str]
    format: Format | None = None
    has_turns: bool = False

    @property
    def is_chat(self) -> bool:
        """Whether the prompts that the format makes are messages."""
        return self.format is not None and (self.format.is_chat or SYSTEM in self.columns or self.has_turns)

    @property
    def described(self) -> str:
        """The format and its columns, as text."""
        title = self.format.title if self.format else OWN_TITLES[self.form]
        return f"{title} ({', '.join(dict.fromkeys(self.columns.values()))})"

    @property
    def identity(self) -> str:
        """The format and its columns, for the run's identity; empty if rows are read as they are."""
        return f"form={self.form} of {','.join(self.columns.values())}" if self.format else ""

    @cached_property
    def makes(self) -> Mapping[str, Made]:
        """Our columns that the format makes, by name."""
        if self.format is None:
            return {}
        asked = tuple(part for part in self.columns if part in (ASKED, *self.format.others))
        whole = Made(asked, self.format.prompt, self.is_chat)
        made = dict(self._of_kind(whole, (*asked, ANSWER)))
        if self.kind == "answers":
            made["label"] = Made((LABEL,), lambda row: row.values[LABEL], False, is_as_stored=True)
        return made

    def _of_kind(self, whole: Made, all_parts: tuple[str, ...]) -> Mapping[str, Made]:
        """Return the columns of prompts and answers. `whole` makes what a file has before the part `answer`."""
        ends_with_answer = ANSWER not in self.columns
        if self.kind in ("prompts", "pairs"):
            return {"prompt": whole}
        if self.kind == "chats" and self.format is not None and self.format.is_chat:
            return {"messages": whole if ends_with_answer else Made(all_parts, self._answered, is_messages=True)}
        if not ends_with_answer:
            return {"prompt": whole, "completion": Made((ANSWER,), lambda row: row.text(ANSWER), is_messages=False)}
        before = Made(whole.parts, lambda row: _split(row, whole.value(row))[0], is_messages=True)
        return {"prompt": before, "completion": Made(whole.parts, lambda row: _split(row, whole.value(row))[1], True)}

    def _answered(self, row: FileRow) -> list[Any]:
        assert self.format is not None
        return [*self.format.prompt(row), {"role": "assistant", "content": row.text(ANSWER)}]


def _split(row: FileRow, messages: Prompt) -> tuple[list[Any], list[Any]]:
    """Return the messages before the answer at the end of a conversation, and the answer."""
    chat: list[Any] = list(messages)
    if len(chat) < 2 or chat[-1]["role"] != "assistant":
        raise row.wrong(ASKED, "a conversation that ends with an answer, which the label rates")
    return chat[:-1], chat[-1:]
