"""Parses tool calls in a model's turn, in the formats of Hermes (also Qwen 2.5 and 3) and Llama 3."""

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from prefect_rlhf.engines.functions.signatures.play_function import ToolFormat
from prefect_rlhf.errors.in_short import in_short

_HERMES = re.compile(r"<tool_call>(.*?)(?:</tool_call>|\Z)", re.DOTALL)
_BETWEEN = re.compile(r"[\s;]*")
_DECODER = json.JSONDecoder()


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A call with its arguments by name."""

    name: str
    arguments: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class BadCall:
    """A malformed tool call; `why` is sent back to the model."""

    why: str


def calls_in(text: str, written_as: ToolFormat) -> Sequence[ToolCall | BadCall]:
    r"""Return the calls in a turn, in order.

    >>> calls_in('Let me see.\n<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>', "hermes")
    [ToolCall(name='add', arguments={'a': 1})]
    >>> calls_in('{"name": "add", "parameters": {"a": 1}}; {"name": "now", "parameters": {}}', "llama3")
    [ToolCall(name='add', arguments={'a': 1}), ToolCall(name='now', arguments={})]
    >>> calls_in("3 is the answer.", "llama3")
    []
    """
    if written_as == "hermes":
        return [_read(found[1], "arguments") for found in _HERMES.finditer(text)]
    return list(_llama3(text))


def _llama3(text: str) -> Iterator[ToolCall | BadCall]:
    """Yield the calls of a turn that is JSON; a JSON value without a name is an answer, no call."""
    text = text.strip().removeprefix("<|python_tag|>").strip()
    if not re.match(r'\{\s*"name"', text):
        return
    position = 0
    while position < len(text):
        try:
            _, end = _DECODER.raw_decode(text, position)
        except (ValueError, RecursionError):
            end = len(text)
        yield _read(text[position:end], "parameters")
        position = _skipped(text, end)


def _skipped(text: str, position: int) -> int:
    found = _BETWEEN.match(text, position)
    return found.end() if found else position


def _read(text: str, key: str) -> ToolCall | BadCall:
    right = f'{{"name": ..., "{key}": {{...}}}}'
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        return BadCall(f"the call is not valid JSON ({error!s:.80}); expected {right}")
    if not isinstance(value, dict) or set(value) != {"name", key}:
        return BadCall(f"the call has the wrong keys; expected {right}")
    name, arguments = value["name"], value[key]
    if not isinstance(name, str) or not isinstance(arguments, dict):
        return BadCall(f"the call has {in_short(name)} and {in_short(arguments)}; expected {right}")
    return ToolCall(name, arguments)
