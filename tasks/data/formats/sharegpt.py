"""ShareGPT: a conversation in turns of `{from, value}`, as LLaMA-Factory, axolotl, Unsloth and TRL read it.

A column `system` has the system prompt; a system turn takes its place. A column `tools` has the schemas of tools.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from prefect_rlhf.tasks.data.formats.format import ASKED, SYSTEM, SYSTEM_PART, TOOLS, Format, Part
from prefect_rlhf.tasks.data.formats.row import ChatMessage, FileRow, decoded
from prefect_rlhf.tasks.data.formats.turns import messages_of


def _conversation(row: FileRow) -> list[ChatMessage]:
    messages = messages_of(row.values[ASKED], row.place(ASKED), row.path, is_whole=True)
    return messages if messages and messages[0]["role"] == SYSTEM else [*row.system_turn(), *messages]


def _schemas(row: FileRow) -> Any:
    """Return the schemas of tools, each as `get_json_schema` writes it; LLaMA-Factory's files have the function alone.

    Anything but schemas is returned as it is.
    """
    found = decoded(row.values[TOOLS])
    if not isinstance(found, list | Mapping):
        return found
    schemas = [decoded(each) for each in (found if isinstance(found, list) else [found])]
    return [{"type": "function", "function": one} if _is_function(one) else one for one in schemas]


def _is_function(schema: Any) -> bool:
    return isinstance(schema, Mapping) and "name" in schema and "function" not in schema


SHAREGPT = Format(
    form="sharegpt",
    title="ShareGPT",
    kinds=("prompts", "chats", "pairs", "answers"),
    asked=Part(("conversations", "conversation"), "turns"),
    prompt=_conversation,
    others={SYSTEM: SYSTEM_PART},
    tools=_schemas,
)
