"""Finds the words in tokens that a chat template wrote: the last user message, and turns without the template's own
words.

For readers of rows, never for training. The heading of a user message is found by rendering short chats. In the texts
here a mark precedes each control token, so that no message can spell a control token.
"""

from __future__ import annotations

import os.path
import re
from collections.abc import Iterator, Sequence
from functools import lru_cache
from itertools import groupby
from typing import Any

from prefect_rlhf.engines.sampling.chats.answer_end import answer_end
from prefect_rlhf.engines.sampling.chats.control_tokens import NEW_NAME, control_tokens
from prefect_rlhf.engines.sampling.chats.template import written
from prefect_rlhf.engines.sampling.chats.turn_tokens import pattern

_FIRST, _SECOND, _SAID = "the first words of a user", "the second words of a user", "the words of an answer"
_ROLES = "user|assistant|model|system|tool|ipython|environment|function|developer"
_ROLE = re.compile(rf"\s*({_ROLES})\s*")
_ROLE_BEFORE = re.compile(rf"\s*({_ROLES})\n")
_SIGN = re.compile(r"[^\w\s]")


class Spoken:
    """Decodes tokens that a tokenizer's chat template wrote."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        texts = control_tokens(tokenizer).texts
        self._control = {int(tokenizer.convert_tokens_to_ids(text)): f"{NEW_NAME}{text}" for text in texts}
        self._heading = _heading(tokenizer, texts)

    def last_user(self, tokens: Sequence[int]) -> str | None:
        """Return the last user message in a prompt's tokens; None if the prompt is not a chat.

        The template's system prompt, tool schemas and other turns are left out.
        """
        text, heading = "", self._heading
        if heading is None:
            return None
        for part in self._backwards(tokens):
            text = part + text
            if found := list(heading.finditer(text)):
                return text[found[-1].end() :].partition(NEW_NAME)[0].strip()
        return None

    def words(self, tokens: Sequence[int], *, has_headings: bool) -> str:
        """Return the tokens' text without control tokens and, if it has headings, without role names.

        An answer to the model has headings before and after it; a turn of the model has no headings.
        """
        parts = [part for part in self._backwards(tokens) if not part.startswith(NEW_NAME)][::-1]
        if has_headings:
            parts = [_ROLE_BEFORE.sub("", part, count=1) for part in parts if not _ROLE.fullmatch(part)]
        return "\n".join(part.strip() for part in parts if part.strip())

    def _backwards(self, tokens: Sequence[int]) -> Iterator[str]:
        """Yield each control token, marked, and the texts between them, beginning at the end."""
        place = len(tokens)
        for is_control, part in groupby(reversed(tokens), key=self._control.__contains__):
            end, place = place, place - sum(1 for _ in part)
            if is_control:
                yield "".join(self._control[token] for token in tokens[place:end])
            else:
                yield str(self._tokenizer.decode(tokens[place:end]))


@lru_cache(maxsize=16)
def spoken(tokenizer: Any) -> Spoken:
    """Return the decoder for a tokenizer's tokens."""
    return Spoken(tokenizer)


def _heading(tokenizer: Any, control: frozenset[str]) -> re.Pattern[str] | None:
    """Return a pattern of the text before a user message; None without a chat template that marks these messages.

    It is the common end of the text before the first message and of the text before a later message.
    """
    if not tokenizer.chat_template:
        return None
    user, said = ({"role": role, "content": _FIRST} for role in ("user", "assistant"))
    chat = [user, said | {"content": _SAID}, user | {"content": _SECOND}]
    try:
        text = written(tokenizer, chat, add_generation_prompt=True)
    except Exception:  # noqa: BLE001  a template is a program of the model's author
        return None
    before, has_first, more = text.partition(_FIRST)
    between, has_second, _ = more.rpartition(_SAID)[2].partition(_SECOND)
    if not has_first or not has_second:
        return None
    marked = [_pieces(part, control) for part in (before, between)]
    heading = "".join(os.path.commonprefix([part[::-1] for part in marked])[::-1])
    heading = heading.rpartition(f"{NEW_NAME}{answer_end(tokenizer).text}")[2]  # of the message before
    if not _SIGN.search(heading):  # a word such as `user`, which messages say too
        return None
    return re.compile(r"\s*".join(map(re.escape, heading.split())) + r"\s?")


def _pieces(text: str, control: frozenset[str]) -> list[str]:
    """Return the control tokens of a text, marked, and each character between them."""
    found = re.finditer(f"({pattern(control).pattern})|.", text, re.DOTALL)
    return [f"{NEW_NAME}{each[0]}" if each[1] else each[0] for each in found]
