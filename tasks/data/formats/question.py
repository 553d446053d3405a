"""A question and its answer, under the column names of public datasets: GSM8K, Orca, OpenRLHF and others.

A text is used as it is, like a `prompt`. With a `system` column, or if the question is messages, the prompt is a chat.
"""

from __future__ import annotations

from prefect_rlhf.tasks.data.formats.format import ASKED, SYSTEM, SYSTEM_PART, Format, Part
from prefect_rlhf.tasks.data.formats.row import FileRow, Prompt
from prefect_rlhf.tasks.data.formats.turns import messages_of


def _asked(row: FileRow) -> Prompt:
    value = row.values[ASKED]
    if isinstance(value, list):
        return row.with_system(messages_of(value, row.place(ASKED), row.path))
    text = row.text(ASKED)
    return row.with_system([{"role": "user", "content": text}]) if SYSTEM in row.columns else text


QUESTION = Format(
    form="question",
    title="question and answer",
    kinds=("prompts", "chats", "pairs", "answers"),
    asked=Part(("question", "problem", "query", "input", "context_messages", "prompt")),
    prompt=_asked,
    answer=Part(("answer", "response", "output", "solution"), "text"),
    others={SYSTEM: SYSTEM_PART},
    is_chat=False,
)
