"""A format: which columns of a file it reads, and how it turns them into our columns."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Literal

from prefect_rlhf.tasks.data.formats.row import FileRow, Prompt

Kind = Literal["prompts", "chats", "pairs", "answers"]
"""What a dataset is for: Prompts, Chats, Preferences or RatedAnswers."""
Shape = Literal["text", "turns", "any"]
"""What a column holds: text, turns of a conversation, or either."""
ASKED, ANSWER, LABEL, TOOLS, SYSTEM = "asked", "answer", "label", "tools", "system"


@dataclass(frozen=True, slots=True)
class Part:
    """A part of a row: the names that its column may have, and its kind of content."""

    names: tuple[str, ...]
    holds: Shape = "any"


@dataclass(frozen=True)
class Format:
    """A format of other libraries."""

    form: str
    """Its name in settings."""
    title: str
    """The name that its users know."""
    kinds: tuple[Kind, ...]
    asked: Part
    prompt: Callable[[FileRow], Prompt]
    """Makes the prompt of a row: messages if the format `is_chat`, if the row has a system prompt, or if `asked` holds
    turns; text otherwise."""
    answer: Part | None = None
    """None if the last turn of `asked` is the answer."""
    others: Mapping[str, Part] = field(default_factory=dict)
    """Parts that a file may lack."""
    is_chat: bool = True
    reads_tools: bool = False
    """Whether a column of tools belongs to it."""

    def needs(self, kind: Kind) -> Mapping[str, Part]:
        """Return the parts that a file must have for a kind of dataset."""
        has_answer = self.answer is not None and kind in ("chats", "answers")
        return {ASKED: self.asked, **({ANSWER: self.answer} if has_answer and self.answer else {}), **OF_KINDS[kind]}


OWN_TITLES: Mapping[str, str] = {
    "prompt": "prompts",
    "messages": "messages",
    "completion": "completions",
    "text": "texts",
    "pairs": "pairs",
}
"""Our own forms as a message names them."""
OF_KINDS: Mapping[Kind, Mapping[str, Part]] = {
    "prompts": {},
    "chats": {},
    "pairs": {"chosen": Part(("chosen",)), "rejected": Part(("rejected",))},
    "answers": {LABEL: Part(("label", "kto_tag"))},
}
"""The parts that a kind of dataset needs in every format."""
SYSTEM_PART = Part(("system", "system_prompt"), "text")
