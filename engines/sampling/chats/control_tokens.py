"""Control tokens, and foreign texts that only spell them: such a text becomes the tokens of its characters.

A tokenizer's control tokens are its special tokens (bos, eos and so on, and every added token marked special) and the
tokens that the chat template writes around messages. Other added tokens, such as Qwen 3's `<think>` and `<tool_call>`,
are words. The words of a message never become control tokens. In a message of the assistant, special tokens that the
template names and does not write around messages are words too, such as Llama 3.1's `<|python_tag|>`, because the model
itself says them.

A message that spells a control token is rendered with a mark after the token's first character, which distinguishes
spelled tokens from the template's own. Then the template's tokens get other names, the marks are removed, and a copy of
the tokenizer that knows its control tokens only by these names makes the tokens.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any

from prefect_rlhf.engines.sampling.chats.listed_ends import listed_ends
from prefect_rlhf.engines.sampling.chats.tokenizers import template_source
from prefect_rlhf.engines.sampling.chats.turn_tokens import added_texts, named_special_tokens, pattern, turn_tokens
from prefect_rlhf.errors.errors import InvalidInput

NEW_NAME = "\U00010600"
"""The first character of a control token's other name: a letter of Linear A, which nobody writes."""
MARKS = "\U00010601\U00010602\U00010603"
"""Marks. They are printable letters, so that a template neither trims nor escapes them."""

Message = Mapping[str, Any]
"""Role, content, and further keys such as `tool_calls`."""


@dataclass(frozen=True, slots=True)
class Guarded:
    """Messages and tool schemas, unchanged, and with a `mark` in each text that spells a control token.

    Without such a text there is no mark.
    """

    messages: Sequence[Message]
    tools: Sequence[Mapping[str, Any]]
    mark: str = ""
    marked_messages: Sequence[Message] = ()
    marked_tools: Sequence[Mapping[str, Any]] = ()


class ControlTokens:
    """The control tokens of a tokenizer."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        added, turns = added_texts(tokenizer), turn_tokens(tokenizer)
        special = {text for text, is_special in added.items() if is_special} | set(tokenizer.all_special_tokens)
        self.texts = frozenset(filter(_is_text, special | turns))
        template = template_source(tokenizer)
        others = special - turns - named_special_tokens(tokenizer) - _ends(tokenizer)
        said = {text for text in others if text in template}
        self._known = pattern({*added, *self.texts})  # of any added token: the longest one counts
        self._found, self._found_in_answers = pattern(self.texts), pattern(self.texts - said)

    def guard(
        self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]] = (), field: str = "text"
    ) -> Guarded:
        """Return messages and tools with a mark in each control token that they spell.

        Raises InvalidInput, at `field`, for texts that contain all possible marks.
        """
        whole = "".join(_texts([[list(each.values()) for each in messages], tools]))
        if not self._found.search(whole):
            return Guarded(messages, tools)
        mark = _unused(whole, field)
        marked = [self._marked_message(each, mark) for each in messages]
        marked_tools = [_marked(each, mark, self._found) for each in tools]
        if marked == list(messages) and marked_tools == list(tools):
            return Guarded(messages, tools)
        return Guarded(messages, tools, mark, marked, marked_tools)

    def tokens(self, text: str, mark: str = "", field: str = "text") -> list[int]:
        """Return a text's tokens. A mark shows the control tokens that are only spelled.

        Raises InvalidInput, at `field`, for a text that this tokenizer cannot read in this way.
        """
        if not mark or mark not in text:
            return self._encoded(self._tokenizer, text)
        renamed = self._known.sub(lambda found: self._name(found[0]), text)
        is_copy = self._read_by_copy(renamed) == self._encoded(self._tokenizer, text)
        tokens = self._read_by_copy(renamed.replace(mark, "")) if is_copy else None
        num_own = sum(self._is_counted(found[0]) for found in self._known.finditer(text))
        return self._checked(text.replace(mark, ""), tokens, num_own, field)

    def following(self, text: str, before: str, mark: str = "", field: str = "text") -> list[int]:
        """Return the tokens that a text has after the text `before`, which they are appended to.

        A tokenizer of sentencepiece puts a space before the first word of a text, but not of what follows. Tokens of
        two texts never merge. Raises as `tokens`.
        """
        for earlier in (before, "\n") if before and self._adds_space else ():
            first, whole = (self.tokens(each, mark, field) for each in (earlier, earlier + text))
            if whole[: len(first)] == first:
                return whole[len(first) :]
        return self.tokens(text, mark, field)

    @cached_property
    def _adds_space(self) -> bool:
        """Whether the tokenizer puts a space before a text's first word."""
        line, both = (self._encoded(self._tokenizer, text) for text in ("\n", "\na"))
        return both[: len(line)] == line and both[len(line) :] != self._encoded(self._tokenizer, "a")

    def plain(self, text: str, field: str = "text") -> list[int]:
        """Return a text's tokens without any control token.

        Raises InvalidInput, at `field`, for a text that this tokenizer cannot read in this way.
        """
        if not self._found.search(text):
            return self._encoded(self._tokenizer, text)
        return self._checked(text, None if NEW_NAME in text else self._read_by_copy(text), 0, field)

    def first_in(self, text: str) -> str:
        """Return the first control token of a text; empty without such a token."""
        found = next((found[0] for found in self._known.finditer(text) if found[0] in self.texts), "")
        return str(found)

    def _marked_message(self, message: Message, mark: str) -> Message:
        """Return a message with marks in its values; a template writes no keys of it."""
        found = self._found_in_answers if message.get("role") == "assistant" else self._found
        return dict(zip(message, _marked(list(message.values()), mark, found), strict=True))

    def _name(self, text: str) -> str:
        return NEW_NAME + text if text in self.texts else text

    def _checked(self, text: str, tokens: list[int] | None, num_control_tokens: int, field: str) -> list[int]:
        """Return a text's tokens, if the copy could read it and found only the template's control tokens."""
        if tokens is None or sum(token in self._ids for token in tokens) != num_control_tokens:
            spelled = ", ".join(sorted(set(self._found.findall(text))))
            expected = f"no special token in a message, such as {spelled}: the tokenizer of"
            raise InvalidInput(field, text, f"{expected} {self._tokenizer.name_or_path} cannot read it as plain text")
        return tokens

    def _read_by_copy(self, text: str) -> list[int] | None:
        """Return a text's tokens by the copy with other names; None if there is no copy, or it cannot read the text."""
        try:
            return self._encoded(self._copy, text)
        except Exception:  # noqa: BLE001  a tokenizer of another form
            return None

    @staticmethod
    def _encoded(tokenizer: Any, text: str) -> list[int]:
        return list(tokenizer(text, add_special_tokens=False)["input_ids"])

    @cached_property
    def _ids(self) -> frozenset[int]:
        return frozenset(map(self._tokenizer.convert_tokens_to_ids, filter(self._is_counted, self.texts)))

    def _is_counted(self, text: str) -> bool:
        """Whether a token is a control token that no text becomes: unknown text may become the unknown token."""
        return text in self.texts and text != self._tokenizer.unk_token

    @cached_property
    def _copy(self) -> Any:
        """The tokenizer with other names of its control tokens. Raises an error if there can be no such copy."""
        backend = getattr(self._tokenizer, "backend_tokenizer", None)
        return _renamed_slow(self._tokenizer, self._name) if backend is None else _renamed(backend, self._name)


@lru_cache(maxsize=4)
def control_tokens(tokenizer: Any) -> ControlTokens:
    """Return a tokenizer's control tokens; the four latest tokenizers' are cached."""
    return ControlTokens(tokenizer)


def _is_text(text: str) -> bool:
    """Whether a special token can be told from ordinary text: a single character or a space is itself."""
    return len(text) > 1 and not text.isspace()


def _ends(tokenizer: Any) -> set[str]:
    """Return the tokens that the tokenizer's folder lists as ends of a response."""
    folder = str(tokenizer.name_or_path)
    tokens = listed_ends(folder) if folder and Path(folder).is_dir() else ()
    return {str(tokenizer.convert_ids_to_tokens(token)) for token in tokens}


def _texts(value: Any) -> Iterator[str]:
    """Yield every text inside a value, keys too, in their order."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for key, each in value.items():
            yield from _texts(key)
            yield from _texts(each)
    elif isinstance(value, list | tuple):
        for each in value:
            yield from _texts(each)


def _unused(text: str, field: str) -> str:
    for mark in MARKS:
        if mark not in text and NEW_NAME not in text:
            return mark
    raise InvalidInput(field, text, f"no letters of Linear A such as {NEW_NAME} in a text with special tokens")


def _marked(value: Any, mark: str, found: re.Pattern[str]) -> Any:
    """Return a value with a mark behind the first character of every token that its texts spell.

    A token may be spelled by neighbouring texts together, such as a role and a content.
    """
    whole, cuts, start = "".join(_texts(value)), [], 0
    while (match := found.search(whole, start)) is not None:
        start = match.start() + 1  # tokens may overlap
        cuts.append(start)
    return _cut(value, iter(_pieces(_texts(value), cuts, mark))) if cuts else value


def _pieces(texts: Iterable[str], cuts: Sequence[int], mark: str) -> Iterator[str]:
    """Yield texts with a mark at each cut, which is a place in all of them together."""
    begin = 0
    for text in texts:
        places = [cut - begin for cut in cuts if begin < cut <= begin + len(text)]
        yield mark.join(text[one:other] for one, other in zip([0, *places], [*places, len(text)], strict=True))
        begin += len(text)


def _cut(value: Any, pieces: Iterator[str]) -> Any:
    """Return a value with other texts, in their order."""
    if isinstance(value, str):
        return next(pieces)
    if isinstance(value, Mapping):
        return {_cut(key, pieces): _cut(each, pieces) for key, each in value.items()}
    return [_cut(each, pieces) for each in value] if isinstance(value, list | tuple) else value


class _Renamed:
    """A tokenizer of the library tokenizers, called as one of transformers."""

    def __init__(self, backend: Any) -> None:
        self._backend = backend

    def __call__(self, text: str, add_special_tokens: bool) -> Mapping[str, list[int]]:
        return {"input_ids": self._backend.encode(text, add_special_tokens=add_special_tokens).ids}


def _renamed(backend: Any, name: Callable[[str], str]) -> _Renamed:
    """Return a copy of a tokenizer that has other names for its tokens."""
    content = json.loads(backend.to_str())
    model = content["model"]
    vocab = model["vocab"]
    is_scored = isinstance(vocab, list)  # Unigram: pieces with scores
    model["vocab"] = [[name(one), score] for one, score in vocab] if is_scored else {
        name(one): token for one, token in vocab.items()
    }  # fmt: skip
    if isinstance(model.get("unk_token"), str):
        model["unk_token"] = name(model["unk_token"])
    for token in content["added_tokens"]:
        token["content"] = name(token["content"])
    content |= {"post_processor": None, "truncation": None, "padding": None}
    return _Renamed(type(backend).from_str(json.dumps(content)))


def _renamed_slow(tokenizer: Any, name: Callable[[str], str]) -> Any:
    """Return a copy of a tokenizer in Python with other names of its added tokens."""
    copy = deepcopy(tokenizer)
    for token in copy._added_tokens_decoder.values():
        token.content = name(token.content)
    copy._added_tokens_encoder = {token.content: number for number, token in copy._added_tokens_decoder.items()}
    copy.tokens_trie = type(copy.tokens_trie)()
    copy._update_trie()
    return copy
