"""Alpaca: an instruction with or without an input, and an output.

As LLaMA-Factory reads it, the user's message is the instruction, a line break and the input. A column `history` has
earlier pairs of question and answer.
"""

from __future__ import annotations

from prefect_rlhf.tasks.data.formats.format import ASKED, SYSTEM, SYSTEM_PART, Format, Part
from prefect_rlhf.tasks.data.formats.row import ChatMessage, FileRow

INPUT, HISTORY = "input", "history"


def _asked(row: FileRow) -> list[ChatMessage]:
    parts = [row.text(ASKED), row.optional_text(INPUT)]
    asked = {"role": "user", "content": "\n".join(filter(None, parts))}
    return [*row.system_turn(), *_earlier(row), asked]


def _earlier(row: FileRow) -> list[ChatMessage]:
    history = row.values.get(HISTORY)
    messages: list[ChatMessage] = []
    for pair in [] if history is None else history if isinstance(history, list) else [history]:
        texts = pair if isinstance(pair, list) else [pair]
        if len(texts) != 2 or not all(isinstance(text, str) and text.strip() for text in texts):
            raise row.wrong(HISTORY, "pairs of a question and its answer")
        messages += [{"role": role, "content": text} for role, text in zip(("user", "assistant"), texts, strict=True)]
    return messages


ALPACA = Format(
    form="alpaca",
    title="Alpaca",
    kinds=("prompts", "chats", "pairs", "answers"),
    asked=Part(("instruction",), "text"),
    prompt=_asked,
    answer=Part(("output", "response"), "text"),
    others={INPUT: Part(("input", "context"), "text"), HISTORY: Part((HISTORY,)), SYSTEM: SYSTEM_PART},
)
