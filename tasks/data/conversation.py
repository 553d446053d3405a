"""Shows a play's row as messages, cut out of its tokens. It renders no text again, so special tokens stay visible.

Each message also has plain words: its text without special tokens and headings or, for a prompt, its last user message.
"""

from collections.abc import Sequence
from itertools import groupby
from operator import itemgetter
from typing import Protocol

PROMPT, ASSISTANT, ENVIRONMENT, FAILED = "prompt", "assistant", "environment", "failed"

Message = dict[str, str]


class Reader(Protocol):
    """Decodes tokens to text: as they are, without the template's special tokens, and a prompt's last user message."""

    def text(self, tokens: Sequence[int]) -> str: ...
    def words(self, tokens: Sequence[int], *, has_headings: bool) -> str: ...
    def asked(self, tokens: Sequence[int]) -> str: ...


def messages(
    tokens: Sequence[int], prompt_length: int, mask: Sequence[int], turn: Sequence[int], read: Reader
) -> list[Message]:
    """Return a row's messages: its prompt, then turns of the model (`assistant`) and answers (`environment`).

    `mask` and `turn` are per response token. A row whose play failed has mask 0 at every token; its response is a
    single message with the role `failed`.
    """
    told = [(PROMPT, list(tokens[:prompt_length]))]
    speakers = [(ASSISTANT if own else ENVIRONMENT, number) for own, number in zip(mask, turn, strict=True)]
    if not any(mask):
        speakers = [(FAILED, 0)] * len(speakers)
    spoken = zip(speakers, tokens[prompt_length:], strict=True)
    for (role, _), part in groupby(spoken, key=itemgetter(0)):
        told.append((role, [token for _, token in part]))
    return [{"role": role, "content": read.text(part), "words": _words(role, part, read)} for role, part in told]


def _words(role: str, tokens: Sequence[int], read: Reader) -> str:
    return read.asked(tokens) if role == PROMPT else read.words(tokens, has_headings=role != ASSISTANT)
