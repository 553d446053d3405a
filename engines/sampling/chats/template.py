"""A chat as its template writes it, with further variables and with tool calls in the form that the template
expects.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from prefect_rlhf.engines.sampling.chats.control_tokens import Guarded, Message
from prefect_rlhf.engines.sampling.chats.tokenizers import template_name
from prefect_rlhf.errors.errors import InvalidInput

Variables = Mapping[str, Any]
"""Further variables of a chat template, such as `enable_thinking`."""
Tools = Sequence[Mapping[str, Any]]
"""JSON schemas."""


ASKED = {"role": "user", "content": "?"}
"""A message that every template should accept."""


def ignores_tools(tokenizer: Any, tools: Tools) -> bool:
    """Whether the template leaves out tool schemas. Raises any error of the template."""
    with_tools, without = (
        written(tokenizer, [ASKED], add_generation_prompt=True, tools=shown) for shown in (tools, ())
    )
    return with_tools == without


def written(
    tokenizer: Any,
    messages: Sequence[Message],
    *,
    tools: Tools = (),
    variables: Variables | None = None,
    add_generation_prompt: bool = False,
) -> str:
    """Return messages as the tokenizer's chat template writes them, with the tool schemas if it shows them.

    If the template needs text, missing content of a message with calls becomes empty text, and call arguments become
    JSON text. Raises any error of the template, which is the model author's program.
    """
    shown = {"tools": list(tools)} if tools else {}
    first: Exception | None = None
    for form in _forms([dict(turn) for turn in messages]):
        try:
            return str(
                tokenizer.apply_chat_template(
                    form, tokenize=False, add_generation_prompt=add_generation_prompt, **shown, **(variables or {})
                )
            )
        except Exception as error:  # noqa: BLE001  as said above
            first = first or error
    assert first is not None  # there is a form, and it did not return
    raise first


def rendered(
    tokenizer: Any,
    guarded: Guarded,
    field: str,
    *,
    variables: Variables | None = None,
    add_generation_prompt: bool = False,
) -> str:
    """Return a guarded chat as the chat template writes it, with its marks.

    Raises InvalidInput, at `field`, for messages that the template refuses, for a broken template, and for a template
    that writes a message differently with marks.
    """
    from jinja2 import TemplateSyntaxError  # only here: the base install has no templates

    turns = [dict(turn) for turn in guarded.messages]
    name = template_name(tokenizer)
    settings: dict[str, Any] = {"variables": variables, "add_generation_prompt": add_generation_prompt}
    try:
        text = written(tokenizer, guarded.messages, tools=guarded.tools, **settings)
        if not guarded.mark:
            return text
        marked = written(tokenizer, guarded.marked_messages, tools=guarded.marked_tools, **settings)
    except TemplateSyntaxError as error:
        raise InvalidInput(field, name, f"valid Jinja (line {error.lineno}: {error.message:.200})") from error
    except Exception as error:  # any error of the template, which is the model author's program
        raise InvalidInput(field, turns, f"messages that {name} accepts ({error!s:.200})") from error
    if marked.replace(guarded.mark, "") != text:
        raise InvalidInput(field, turns, f"no special tokens in messages: {name} changes them")
    return marked


def _forms(messages: list[dict[str, Any]]) -> Iterator[list[dict[str, Any]]]:
    """Yield messages as they are, then with text instead of no content and of arguments, which some templates need."""
    yield messages
    with_text = [turn | {"content": ""} if turn.get("content", "") is None else turn for turn in messages]
    has_none = with_text != messages
    if has_none:
        yield with_text
    if any(turn.get("tool_calls") for turn in messages):
        yield [_with_text_arguments(turn) for turn in messages]
        if has_none:
            yield [_with_text_arguments(turn) for turn in with_text]


def _with_text_arguments(turn: dict[str, Any]) -> dict[str, Any]:
    """Return a message whose calls have their arguments as JSON text."""
    calls = turn.get("tool_calls")
    if not isinstance(calls, list):
        return turn
    return turn | {"tool_calls": [_with_text(call) for call in calls]}


def _with_text(call: Any) -> Any:
    if not isinstance(call, Mapping):
        return call
    if isinstance(call.get("function"), Mapping):
        return {**call, "function": _with_text(call["function"])}
    arguments = call.get("arguments")
    return {**call, "arguments": json.dumps(arguments, ensure_ascii=False)} if isinstance(arguments, Mapping) else call
