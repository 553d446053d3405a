"""Converts messages from the forms found in files to the form that chat templates take.

Parquet gives every message all keys of its type, so keys with None are left out. Lines that Arrow wrote have them too.
Content in parts is joined, unless the template takes parts. Call arguments and tool schemas may be JSON text.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from functools import lru_cache
from typing import Any

from prefect_rlhf.engines.sampling.chats.template import Tools, written
from prefect_rlhf.errors.errors import InvalidInput
from prefect_rlhf.tasks.data.formats.row import decoded
from prefect_rlhf.tasks.data.stored.columns import MAY_BE_NULL

_MARKER = "the text of a part"
MAY_BE_EMPTY = ("tool", "system")
"""Roles whose text may be empty: a tool returns nothing, and public data sets have a system turn in every chat."""


def plain_messages(tokenizer: Any, messages: Any, has_all_keys: bool, where: str) -> Any:
    """Return messages as a tokenizer's template takes them; a value that is not a list is returned unchanged.

    `has_all_keys` means that the file gives each message every key, with None for missing keys. Raises InvalidInput, at
    `where`, for a part that is not text.
    """
    if not isinstance(messages, list):
        return messages
    return [
        turn if _is_plain(turn) else _plain(tokenizer, turn, has_all_keys, f"{where} message {number}")
        for number, turn in enumerate(messages)
    ]


def shown_tools(value: Any, has_all_keys: bool, where: str) -> Tools:
    """Return the tool schemas in a row's column: a list of objects, or JSON text of the list or of each object.

    A function alone, as many public data sets have it, becomes a schema as `get_json_schema` writes it. Raises
    InvalidInput, at `where`, for any other value.
    """
    expected = "tool schemas: a list of objects, or its JSON text; if the column has no tools, set tools_column"
    found = decoded(value)
    schemas = [decoded(each) for each in (found if isinstance(found, list) else [found])] if found else []
    if not all(isinstance(schema, Mapping) for schema in schemas):
        raise InvalidInput(where, value, f"{expected} to null")
    schemas = [_without_none(schema, but=() if has_all_keys else MAY_BE_NULL) for schema in schemas]
    return [{"type": "function", "function": each} if _is_function(each) else each for each in schemas]


def _is_function(schema: Mapping[str, Any]) -> bool:
    return "name" in schema and "function" not in schema


def has_text(turn: Mapping[str, Any]) -> bool:
    """Whether a message has content: text that is not blank, or a call. Some roles' text may be empty."""
    content = turn.get("content")
    if isinstance(content, list):
        content = "".join(str(part.get("text") or "") for part in content)
    if turn.get("tool_calls") or (turn["role"] in MAY_BE_EMPTY and content is not None):
        return content is None or isinstance(content, str)
    return isinstance(content, str) and bool(content.strip())


def _is_plain(turn: Any) -> bool:
    return isinstance(turn, dict) and len(turn) == 2 and "role" in turn and isinstance(turn.get("content"), str)


def _plain(tokenizer: Any, turn: Any, has_all_keys: bool, where: str) -> Any:
    if not isinstance(turn, Mapping):
        return turn
    content = turn.get("content")
    kept = {key: value for key, value in turn.items() if value is not None and value != [] or key == "content"}
    plain = {key: _without_none(value) for key, value in kept.items()} if has_all_keys else kept
    if "content" in turn or "tool_calls" in plain:
        plain["content"] = _content(tokenizer, content, where)
    if "tool_calls" in plain:
        calls = decoded(plain["tool_calls"])
        plain["tool_calls"] = [_with_arguments(call) for call in calls] if isinstance(calls, list) else calls
    return plain


def _content(tokenizer: Any, content: Any, where: str) -> Any:
    """Return content as it is, or its parts as one text or, if the template takes parts, as parts."""
    if not isinstance(content, list):
        return content
    parts = [_without_none(part) for part in content]
    for part in parts:
        kind = part.get("type", "text") if isinstance(part, Mapping) else type(part).__name__
        if kind != "text" or not isinstance(part.get("text"), str):
            raise InvalidInput(where, f"a part of type {kind}", "content in parts of type text: images are not read")
    return parts if _takes_parts(tokenizer) else "".join(part["text"] for part in parts)


@lru_cache(maxsize=4)
def _takes_parts(tokenizer: Any) -> bool:
    """Whether the template writes text in parts as it writes the text alone."""
    if not tokenizer.chat_template:
        return False
    try:
        in_parts, alone = (
            written(tokenizer, [{"role": "user", "content": content}])
            for content in ([{"type": "text", "text": _MARKER}], _MARKER)
        )
    except Exception:  # noqa: BLE001  a template is a program of the model's author
        return False
    return in_parts == alone


def _with_arguments(call: Any) -> Any:
    """Return a call with its arguments as an object, if they are JSON text of an object."""
    call = decoded(call)
    if not isinstance(call, Mapping):
        return call
    if isinstance(call.get("function"), Mapping):
        return {**call, "function": _with_arguments(call["function"])}
    arguments = decoded(call.get("arguments"))
    return {**call, "arguments": arguments} if isinstance(arguments, Mapping) else call


def _without_none(value: Any, but: Collection[str] = ()) -> Any:
    """Return a value without the keys inside it that are None, except for some names."""
    if isinstance(value, Mapping):
        return {key: _without_none(each, but) for key, each in value.items() if each is not None or key in but}
    return [_without_none(each, but) for each in value] if isinstance(value, list) else value


def ignores_key(tokenizer: Any, messages: Sequence[Mapping[str, Any]], key: str) -> bool:
    """Whether the template leaves out a key of messages, such as `tool_calls`."""
    without = [{name: value for name, value in turn.items() if name != key} for turn in messages]
    try:
        return written(tokenizer, messages) == written(tokenizer, without)
    except Exception:  # noqa: BLE001  it refuses a message without the key, so it reads it
        return False
