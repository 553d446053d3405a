"""ShareGPT: a conversation in turns of `{from, value}`, as LLaMA-Factory, axolotl, Unsloth and TRL read it.

A column `system` has the system prompt; a system turn takes its place. A column `tools` has the schemas of tools.
"""

from __future__ import annotations

from prefect_rlhf.tasks.data.formats.format import ASKED, SYSTEM, SYSTEM_PART, Format, Part
from prefect_rlhf.tasks.data.formats.row import ChatMessage, FileRow
from prefect_rlhf.tasks.data.formats.turns import messages_of


def _conversation(row: FileRow) -> list[ChatMessage]:
    return row.with_system(messages_of(row.values[ASKED], row.place(ASKED), row.path, is_whole=True))


SHAREGPT = Format(
    form="sharegpt",
    title="ShareGPT",
    kinds=("prompts", "chats", "pairs", "answers"),
    asked=Part(("conversations", "conversation"), "turns"),
    prompt=_conversation,
    others={SYSTEM: SYSTEM_PART},
    reads_tools=True,
)
