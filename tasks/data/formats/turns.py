"""Converts turns of a conversation to messages: ShareGPT has `{from, value}`, others `{role, value}` or `{role,
content}`.

The order of `{from, value}` turns is checked as LLaMA-Factory does: after a system turn, a question or the results of
tools, then an answer, and so on. Turns with a role are messages already, and the template checks their order.
"""

from __future__ import annotations

from ast import literal_eval
from collections.abc import Collection, Mapping
from typing import Any

from prefect_rlhf.errors.errors import InvalidInput
from prefect_rlhf.tasks.data.formats.row import ChatMessage, decoded

SYSTEM, USER, ASSISTANT, TOOL, CALL = "system", "user", "assistant", "tool", "call"
SPEAKERS: Mapping[str, str] = {
    "system": SYSTEM,
    **dict.fromkeys(("human", "user"), USER),
    **dict.fromkeys(("gpt", "assistant", "chatgpt", "model"), ASSISTANT),
    **dict.fromkeys(("function_call", "tool_call"), CALL),
    **dict.fromkeys(("observation", "tool", "tool_response", "function_response"), TOOL),
}
"""The role for each name in `from`."""
CALLERS = tuple(name for name, role in SPEAKERS.items() if role == CALL)
AFTER: Mapping[str, Collection[str]] = {
    "": (SYSTEM, USER),
    SYSTEM: (USER,),
    USER: (ASSISTANT, CALL),
    TOOL: (TOOL, ASSISTANT, CALL),
    ASSISTANT: (USER, TOOL),
    CALL: (TOOL,),
}
"""The speakers that may follow a speaker. A model may write its calls as text, so results may follow any answer."""


def are_turns(keys: Collection[str]) -> bool:
    """Whether objects with these keys are turns.

    >>> are_turns({"from", "value"}), are_turns({"role", "content"}), are_turns({"role", "text"})
    (True, True, False)
    """
    return bool({"from", "role"} & set(keys)) and bool({"value", "content"} & set(keys))


def spells_turns(text: str) -> bool:
    """Whether a text is a conversation in JSON, or as Python prints it: spreadsheets and databases have such columns.

    >>> spells_turns('[{"role": "user", "content": "Hi"}]'), spells_turns('[{"role": "admin", "content": 1}]')
    (True, False)
    """
    if not text.lstrip().startswith("["):
        return False
    try:
        in_json = decoded(text)
        turns = in_json if isinstance(in_json, list) else literal_eval(text.strip())
    except (ValueError, SyntaxError, MemoryError, RecursionError):
        return False
    return bool(turns) and all(
        isinstance(turn, Mapping) and are_turns(turn) and turn.get("from", turn.get("role")) in SPEAKERS
        for turn in turns
    )


def messages_of(turns: Any, where: str, path: str, is_whole: bool = False) -> list[ChatMessage]:
    """Return turns, or a single turn, as messages; a system turn without text is left out.

    A whole conversation begins with a question; an answer's turns may begin anywhere. Raises InvalidInput, at `where`
    and with the file's `path`, for other values, an unknown speaker, and turns out of order.
    """
    found = [turns] if isinstance(turns, Mapping) else turns
    if not isinstance(found, list) or not found:
        raise InvalidInput(where, turns, f"at least one turn, in {path}")
    messages: list[ChatMessage] = []
    before = "" if is_whole else None
    for number, turn in enumerate(found):
        place = f"{where} turn {number}"
        if not isinstance(turn, Mapping) or not are_turns(turn.keys()) and not turn.get("tool_calls"):
            raise InvalidInput(place, turn, f"{{from, value}} or {{role, content}}, in {path}")
        if turn.get("from") is None:
            messages.append(_renamed(turn))
            continue
        before = _checked(turn["from"], before, place, path)
        message = _message(SPEAKERS[turn["from"]], turn, place, path)
        if message["role"] != SYSTEM or message["content"].strip():
            messages.append(message)
    return messages


def _checked(name: Any, before: str | None, place: str, path: str) -> str:
    """Return the name of a turn. Raises InvalidInput for an unknown name, and for one that may not follow `before`.

    That is empty before the first turn of a conversation, and None if any turn may be the first.
    """
    if not isinstance(name, str) or name not in SPEAKERS:
        raise InvalidInput(f"{place} from", name, f"one of {', '.join(SPEAKERS)}, in {path}")
    if before is None:
        return name
    allowed = AFTER[SPEAKERS[before] if before else ""]
    if SPEAKERS[name] not in allowed:
        names = " or ".join(next(each for each, role in SPEAKERS.items() if role == one) for one in allowed)
        seen = f"{name} after {before}" if before else f"{name} as the first turn"
        raise InvalidInput(f"{place} from", seen, f"{names}; correct or remove the row, in {path}")
    return name


def _message(speaker: str, turn: Mapping[str, Any], place: str, path: str) -> dict[str, Any]:
    value = turn.get("value", turn.get("content"))
    if speaker == CALL:
        return {"role": ASSISTANT, "content": "", "tool_calls": _calls(value, place, path)}
    may_be_blank = speaker in (SYSTEM, TOOL)
    if not (isinstance(value, list) or isinstance(value, str) and (may_be_blank or value.strip())):
        raise InvalidInput(f"{place} value", value, f"text that is not empty, in {path}")
    return {**_others(turn), "role": speaker, "content": value}


def _renamed(turn: Mapping[str, Any]) -> dict[str, Any]:
    """Return a turn that has a role as a message."""
    value = turn.get("content") if turn.get("value") is None else turn["value"]
    content = {"content": value} if {"value", "content"} & turn.keys() else {}
    return {**_others(turn), "role": turn.get("role"), **content}


def _others(turn: Mapping[str, Any]) -> dict[str, Any]:
    """Return the keys of a turn that its message has as they are."""
    return {key: value for key, value in turn.items() if key not in ("from", "value", "role", "content")}


def _calls(value: Any, place: str, path: str) -> list[dict[str, Any]]:
    """Return calls of tools: the JSON of a `{name, arguments}`, or of a list of them."""
    found = decoded(value)
    calls = found if isinstance(found, list) else [found]
    for call in calls:
        if not isinstance(call, Mapping) or not isinstance(call.get("name"), str) or "arguments" not in call:
            expected = f"JSON of a call, {{name, arguments}}, or of a list of calls, in {path}"
            raise InvalidInput(f"{place} value", value, expected)
    return [
        {"type": "function", "function": {"name": call["name"], "arguments": decoded(call["arguments"])}}
        for call in calls
    ]
