"""Checks that the chat template shows everything a dataset gives it (variables, tools and calls) in known tokens."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import lru_cache
from typing import Any, Protocol

from prefect_rlhf.engines.sampling.chats.template import ASKED, Tools, ignores_tools, written
from prefect_rlhf.engines.sampling.chats.tokenizers import template_name, template_source
from prefect_rlhf.errors.errors import InvalidInput, NotUsed
from prefect_rlhf.tasks.data.formats.formatted_rows import FormattedRows
from prefect_rlhf.tasks.data.messages import ignores_key

DEFAULT_TOOLS_COLUMN = "tools"
ANOTHER_TEMPLATE = "set the model's chat_template, as in actor.chat_template: tools.jinja (prefect-rlhf init writes it)"
"""The remedy for a folder without a template, or with one that ignores tools."""
CLOCK, STRIKE = "strftime_now", "\u23f0"  # a template's function for the time, and what stands for it in a check
WORDS = "the words of a message"  # in a check of roles
MARK = re.compile(r"<\|\w+\|>")  # of a turn's begin or end, in most templates
SAID_APART = {"tool_calls": "calls", "reasoning_content": "thoughts", "thinking": "thoughts", "reasoning": "thoughts"}
"""Message keys for what an assistant says besides its text, each with our word for it."""
RESERVED = (
    *("messages", "conversation", "tools", "documents", "chat_template", "add_generation_prompt", "tokenize"),
    *("continue_final_message", "padding", "truncation", "max_length", "return_tensors", "return_dict"),
    *("return_assistant_tokens_mask", "tokenizer_kwargs"),
)
"""Arguments of `apply_chat_template` that are not variables of a dataset."""


class Templated(Protocol):
    """A dataset as these checks see it."""

    @property
    def name(self) -> str: ...
    @property
    def tokenizer(self) -> str: ...
    @property
    def loaded(self) -> Any: ...
    @property
    def tools_column(self) -> str | None: ...
    @property
    def shown_column(self) -> str | None: ...
    @property
    def chat_template_kwargs(self) -> Mapping[str, Any]: ...
    @property
    def goes_through_template(self) -> bool: ...
    @property
    def message_columns(self) -> tuple[str, ...]: ...
    @property
    def rows(self) -> FormattedRows: ...
    def tools_of(self, items: Sequence[int]) -> list[Tools]: ...
    def messages(self, column: str, items: Sequence[int]) -> list[Any]: ...


def template_variables(kwargs: Mapping[str, Any], eos_token: str | None) -> Mapping[str, Any]:
    """Return a template's variables: the dataset's, and the model's end of an answer if a setting states it."""
    return kwargs if eos_token is None else {"eos_token": eos_token, **kwargs}


def check_variables(source: Templated, tokenizer: Any) -> None:
    """Raise InvalidInput for variables without a template, and for variables that the template does not use."""
    field, kwargs = f"{source.name}.chat_template_kwargs", source.chat_template_kwargs
    if kwargs and not source.goes_through_template:
        raise NotUsed(field, dict(kwargs), "the rows do not go through a chat template", "set chat_template: true")
    if source.tools_column not in (None, DEFAULT_TOOLS_COLUMN) and not source.goes_through_template:
        reason = "the rows do not go through a chat template"
        raise NotUsed(f"{source.name}.tools_column", source.tools_column, reason, "set chat_template: true")
    for name in kwargs:
        if name in RESERVED:
            raise InvalidInput(field, name, "another variable of the chat template: this name has its own setting")
        if not re.search(rf"\b{re.escape(name)}\b", template_source(tokenizer)):
            raise InvalidInput(field, name, f"a variable that {template_name(tokenizer)} reads")


def check_tools(source: Templated, tokenizer: Any) -> None:
    """Raise InvalidInput if the template does not show the tools of the first row that has tools."""
    if source.shown_column is None:
        return
    rows = (source.tools_of([item])[0] for item in range(len(source.rows)))  # other rows' tools are read with them
    tools = next(filter(None, rows), None)
    if tools is None:
        return
    try:
        is_ignored = ignores_tools(tokenizer, tools)
    except Exception:  # noqa: BLE001  it refuses this chat; the rows' own chats are rendered later
        return
    if is_ignored:
        ignores = f"{template_name(tokenizer)} ignores them: {ANOTHER_TEMPLATE}"
        right = f"null, or a chat template that shows tools; {ignores}"
        raise InvalidInput(f"{source.name}.tools_column", source.tools_column, right)


@lru_cache(maxsize=256)
def leaves_out(tokenizer: Any, role: str) -> bool:
    """Whether the template writes chats with a message of this role, and nothing of that message.

    False if it refuses such chats: the rows' own chats are rendered later.
    """
    message = {"role": role, "content": WORDS}
    shown = []
    for chat in ([ASKED, message], [message, ASKED], [message]):
        with suppress(Exception):  # a template is a program of the model's author
            shown.append(WORDS in written(tokenizer, chat))
    return bool(shown) and not any(shown)


def unknown_marks(source: Templated) -> tuple[str, ...]:
    """Return a line about marks such as <|im_end|> that the template writes and the tokenizer does not have as tokens.

    A template of another model is like that: its turns have no end that generation could stop at.
    """
    if not source.goes_through_template:
        return ()
    tokenizer, vocabulary = source.loaded, source.loaded.get_vocab()
    marks = [mark for mark in dict.fromkeys(MARK.findall(_asked(tokenizer))) if mark not in vocabulary]
    if not marks:
        return ()
    writes = f"{template_name(tokenizer)} writes {' and '.join(marks)}"
    return (f"{source.name}: {writes}, no tokens of {source.tokenizer}: is it the template of another model?",)


def dated(source: Templated) -> tuple[str, ...]:
    """Return a line about a template that writes today's date, as that of Llama 3.2, and how to fix the date.

    Its tokens change at midnight, so a run and its resume would not read the same prompts.
    """
    if not source.goes_through_template or CLOCK not in (text := template_source(source.loaded)):
        return ()
    variables = template_variables(source.chat_template_kwargs, None)
    if not _shows_time(source.loaded, variables):
        return ()
    names = dict.fromkeys(re.findall(r"(\w+) is (?:not )?defined", text))
    fixed = next((name for name in names if not _shows_time(source.loaded, {**variables, name: "1 Jan 2026"})), None)
    remedy = f"{source.name}.chat_template_kwargs: {{{fixed}: 1 Jan 2026}}" if fixed else "another chat_template"
    changes = "so its tokens change at midnight, also in a resumed run"
    return (f"{source.name}: {template_name(source.loaded)} writes today's date, {changes}; {remedy} fixes it",)


def _shows_time(tokenizer: Any, variables: Mapping[str, Any]) -> bool:
    """Whether a chat shows the time, which the template gets by a function of Transformers."""
    return STRIKE in _asked(tokenizer, {**variables, CLOCK: lambda _: STRIKE})


def _asked(tokenizer: Any, variables: Mapping[str, Any] | None = None) -> str:
    """Return a chat of one question as the template writes it for an answer; empty if the template refuses it."""
    try:
        return written(tokenizer, [ASKED], variables=variables, add_generation_prompt=True)
    except Exception:  # noqa: BLE001  an author's program may raise anything; the rows' own chats are rendered later
        return ""


def unshown(source: Templated) -> tuple[str, ...]:
    """Return lines about a column of tools without a template, and about calls or thoughts that the template leaves
    out.
    """
    lines = []
    if source.tools_column in source.rows.names and not source.goes_through_template:
        lines.append(f"{source.name}: the column {source.tools_column} is not shown: the rows are not chats")
    for column in source.message_columns:
        keys = source.rows.column(column).message_keys
        for key, what in SAID_APART.items():
            if key in keys and (row := _ignored(source, column, key)) is not None:
                ignored = f"{template_name(source.loaded)} does not write {key}"
                lines.append(f"{source.name}: {ignored}: the {what} of row {row} are not in its tokens")
    return tuple(lines)


def _ignored(source: Templated, column: str, key: str) -> int | None:
    """Return the first row with a key in its messages if the template leaves it out there."""
    for item in range(len(source.rows)):
        (chat,) = source.messages(column, [item])
        if isinstance(chat, list) and any(turn.get(key) for turn in chat):
            return item if ignores_key(source.loaded, chat, key) else None
    return None
