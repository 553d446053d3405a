"""The tokens that a chat template writes around messages, found by rendering short chats."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

NAMED = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
_SYSTEM = {"role": "system", "content": "the first text"}
_ASKED = {"role": "user", "content": "the second text"}
_SAID = {"role": "assistant", "content": "the third text"}
_IDS = ("123456789", "123456780")  # Mistral's have nine characters
_CALLS = [{"id": each, "type": "function", "function": {"name": "a_tool", "arguments": {}}} for each in _IDS]
_TOOLS = [
    {"role": "tool", "name": "a_tool", "tool_call_id": each, "content": f"the text {number} of a tool"}
    for number, each in enumerate(_IDS)
]


def added_texts(tokenizer: Any) -> dict[str, bool]:
    """Return bos, eos and the tokenizer's other named tokens."""
    return {token.content: token.special for token in tokenizer.added_tokens_decoder.values()}


def named_special_tokens(tokenizer: Any) -> set[str]:
    """Return bos, eos and the other tokens with a name."""
    return {str(token) for name in NAMED if (token := getattr(tokenizer, name, None)) is not None}


def pattern(texts: Collection[str]) -> re.Pattern[str]:
    """Return a pattern that finds the first of these texts, and the longest at its place, as tokenizers do.

    >>> pattern(["<s>", "<s>end"]).findall("a <s>end <s>")
    ['<s>end', '<s>']
    """
    longest_first = sorted(filter(None, texts), key=len, reverse=True)
    return re.compile("|".join(map(re.escape, longest_first)) if longest_first else r"(?!)")


def turn_tokens(tokenizer: Any) -> frozenset[str]:
    """Return the added tokens in brackets that the chat template writes around messages of every role.

    Pairs such as `<think>` and `</think>` in the heading of an answer are words of the model.
    """
    if not tokenizer.chat_template:
        return frozenset()
    added = added_texts(tokenizer)
    find = pattern(added).findall
    around = {token for text in _around(tokenizer) for token in find(text)}
    heads = {token for token in find(_heading(tokenizer)) if not _partners(token) & added.keys()}
    return frozenset(filter(_is_in_brackets, around | heads))


def _is_in_brackets(token: str) -> bool:
    """Whether a token is no word: signs begin and end it, as in `<|user|>` and `[INST]`."""
    return not any(each.isalnum() or each.isspace() for each in (token[0], token[-1]))


def _around(tokenizer: Any) -> Iterator[str]:
    """Yield the text around messages, without headings of answers. The messages' own texts have no tokens."""
    yield _written(tokenizer, [_ASKED])
    yield _written(tokenizer, [_SYSTEM, _ASKED])
    for more in ([], [_ASKED]):  # the end of an answer, with a message after it and without
        yield _written(tokenizer, [_ASKED, _SAID, *more]).rpartition(_SAID["content"])[2]
    for calls in _CALLS, _CALLS[:1]:  # between two answers of tools; some templates take a single call
        called = {"role": "assistant", "content": "", "tool_calls": calls}
        answered = _written(tokenizer, [_ASKED, called, *_TOOLS])
        yield answered.rpartition(_TOOLS[0]["content"])[2].partition(_TOOLS[1]["content"])[0]


def _heading(tokenizer: Any) -> str:
    """Return the text that prompts for an answer."""
    return _written(tokenizer, [_ASKED], add_generation_prompt=True).removeprefix(_written(tokenizer, [_ASKED]))


def _partners(token: str) -> set[str]:
    """Return the closing token of an opening token, or the opening token of a closing token.

    >>> _partners("<think>"), _partners("[/THINK]")
    ({'</think>'}, {'[THINK]'})
    """
    opened, closed = token.replace("/", "", 1), f"{token[:1]}/{token[1:]}"
    return {closed if opened == token else opened}


def _written(tokenizer: Any, chat: Sequence[Mapping[str, Any]], add_generation_prompt: bool = False) -> str:
    """Return a chat as the template writes it; empty if it refuses the chat."""
    try:
        return str(
            tokenizer.apply_chat_template(
                [dict(turn) for turn in chat], tokenize=False, add_generation_prompt=add_generation_prompt
            )
        )
    except Exception:  # noqa: BLE001  a template is a program of the model's author
        return ""
