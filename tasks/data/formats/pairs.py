"""Preference pairs that repeat the prompt on both sides: finds the prompt and each side's answer."""

from collections.abc import Sequence
from itertools import takewhile
from os.path import commonprefix
from typing import Any

from prefect_rlhf.errors.errors import InvalidInput
from prefect_rlhf.tasks.data.formats.row import ChatMessage, Prompt

SPEAKS = "\n\nAssistant:"
"""The text before an answer in an hh-rlhf transcript."""
Pair = tuple[Any, Any, Any]
"""A row's prompt (None without a column of prompts) and two answers."""


Answer = str | ChatMessage
"""The text of an answer, or its message if that has more, such as calls of tools."""


def pair_of_chats(where: str, pair: Pair) -> tuple[Prompt, Answer, Answer]:
    """Return the prompt and both answers of chosen and rejected messages, as TRL reads them.

    The messages shared at the beginning are the prompt. An explicit prompt precedes them, or equals their beginning, as
    messages or as the text of a message. The rest of each side is a single assistant message. Raises InvalidInput, at
    `where`, for any other pair.
    """
    prompt, chosen, rejected = pair
    if not chosen or not rejected:
        raise InvalidInput(where, chosen and rejected, "an answer on both sides")
    if [*map(_said, chosen)] == [*map(_said, rejected)]:
        raise InvalidInput(where, chosen, "two answers that differ")
    sides = zip(chosen, rejected, strict=False)
    shared = [turn for turn, _ in takewhile(lambda turns: _said(turns[0]) == _said(turns[1]), sides)]
    answers = []
    for side in (chosen, rejected):
        rest = side[len(shared) :]
        if len(rest) != 1 or rest[0]["role"] != "assistant":
            roles = ", ".join(str(turn["role"]) for turn in rest) or "no message"
            raise InvalidInput(
                where, roles, "a single message of the assistant after the messages that both sides begin with"
            )
        is_text = set(rest[0]) == {"role", "content"} and not isinstance(rest[0]["content"], list)
        answers.append(rest[0]["content"] if is_text else rest[0])
    return _whole_prompt(where, prompt, shared), answers[0], answers[1]


def pair_of_texts(where: str, chosen: Any, rejected: Any) -> tuple[str, Any, Any]:
    """Return the prompt and both answers of two texts with the same beginning.

    In a transcript (`Human: ... Assistant: ...`, as in hh-rlhf) the prompt ends with the last `Assistant:` that both
    have. In other texts it is their common beginning, without a trailing space, as in TRL's `extract_prompt`. It never
    ends within a word, because a model would not sample the rest of a word. Raises InvalidInput, at `where`, for texts
    that begin differently.

    >>> pair_of_texts("row 0", "The sky is blue.", "The sky is green.")
    ('The sky is', ' blue.', ' green.')
    """
    if not (isinstance(chosen, str) and isinstance(rejected, str)) or chosen == rejected:
        return "", chosen, rejected  # what is wrong with answers is said by their check
    shared = commonprefix([chosen, rejected])
    turn = shared.rfind(SPEAKS)
    length = turn + len(SPEAKS) if turn >= 0 else _whole_words(shared, chosen, rejected)
    if not shared[:length].strip():
        expected = "texts that begin alike: without a column of prompts, their beginning is the prompt; with"
        raise InvalidInput(where, chosen, f"{expected} prompt_column null, both are answers without a prompt")
    return shared[:length], chosen[length:], rejected[length:]


def _whole_words(shared: str, chosen: str, rejected: str) -> int:
    """Return how much of a shared beginning ends before a space or after a whole word, in characters."""
    length = len(shared)
    inside = any(text[length : length + 1].isalnum() for text in (chosen, rejected))
    while inside and length and shared[length - 1].isalnum():
        length -= 1
    return length - 1 if shared[:length].endswith(" ") else length


def _whole_prompt(where: str, prompt: Any, shared: Sequence[ChatMessage]) -> Prompt:
    """Combine an explicit prompt with the messages that both sides begin with."""
    if not shared:
        if not prompt:
            raise InvalidInput(where, prompt, "a prompt: messages that both sides begin with, or a separate column")
        whole: Prompt = prompt
        return whole
    if isinstance(prompt, str):
        if prompt.strip() not in {str(turn.get("content")).strip() for turn in shared} | {""}:
            expected = (
                "a message that both sides begin with; with an empty prompt_column, these messages are the prompt"
            )
            raise InvalidInput(where, prompt, expected)
        return shared
    turns = list(prompt or ())
    said, of_prompt = [*map(_said, shared)], [*map(_said, turns)]
    if said[: len(turns)] == of_prompt:
        return shared
    return turns if of_prompt[-len(said) :] == said else [*turns, *shared]


def _said(turn: ChatMessage) -> tuple[Any, ...]:
    return turn["role"], turn.get("content"), turn.get("tool_calls")
