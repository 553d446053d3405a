"""OpenAI's messages next to a prompt in another column: the messages before the answer, or including it."""

from __future__ import annotations

from prefect_rlhf.tasks.data.formats.format import ASKED, Format, Part
from prefect_rlhf.tasks.data.formats.row import ChatMessage, FileRow
from prefect_rlhf.tasks.data.formats.turns import messages_of


def _messages(row: FileRow) -> list[ChatMessage]:
    return messages_of(row.values[ASKED], row.place(ASKED), row.path, is_whole=True)


MESSAGES = Format(
    form="messages",
    title="messages",
    kinds=("prompts", "answers"),
    asked=Part(("messages",), "turns"),
    prompt=_messages,
)
