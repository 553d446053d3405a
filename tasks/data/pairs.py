"""A preference pair in messages: which of them are the prompt, and what each side answers."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import takewhile
from typing import Any

from prefect_rlhf.placement.errors import InvalidInput
from prefect_rlhf.tasks.data.tokenizer import ChatMessage, Prompt

Pair = tuple[Any, Any, Any]
"""A prompt (None: there is no column of prompts) and two answers, as a row has them."""


def pair_of_chats(where: str, pair: Pair) -> tuple[Prompt, str, str]:
    """Return the prompt and both answers' text of chosen and rejected messages, as TRL reads them.

    Messages that both begin with are the prompt. An explicit prompt stands before them, or is what they begin with, as
    messages or as a text that is one of them. What is left of each side is one message of the assistant. Raises
    InvalidInput, at `where`, for anything else.
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
            roles = ", ".join(str(turn["role"]) for turn in rest) or "nothing"
            raise InvalidInput(where, roles, "one message of the assistant after those that both sides begin with")
        answers.append(rest[0]["content"])
    return _whole_prompt(where, prompt, shared), answers[0], answers[1]


def _whole_prompt(where: str, prompt: Any, shared: Sequence[ChatMessage]) -> Prompt:
    """Return an explicit prompt and the messages that both sides begin with as one."""
    if not shared:
        if not prompt:
            raise InvalidInput(where, prompt, "a prompt: messages that both sides begin with, or a column of its own")
        whole: Prompt = prompt
        return whole
    if isinstance(prompt, str):
        if prompt.strip() not in {str(turn["content"]).strip() for turn in shared} | {""}:
            expected = "one of the messages that both sides begin with; an empty prompt_column takes those alone"
            raise InvalidInput(where, prompt, expected)
        return shared
    turns = list(prompt or ())
    begins_with = [*map(_said, shared[: len(turns)])] == [*map(_said, turns)]
    return shared if begins_with else [*turns, *shared]


def _said(turn: ChatMessage) -> tuple[str, str]:
    return turn["role"], turn["content"]
