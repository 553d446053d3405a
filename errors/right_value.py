"""Says what would be right instead of a value that pydantic refused, in terms of YAML."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from difflib import get_close_matches
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pydantic_core import ErrorDetails

_TYPES: Mapping[str, str] = MappingProxyType(
    {
        "int": "a whole number",
        "float": "a number",
        "finite": "a finite number",
        "bool": "true or false",
        "string": "text",
        "list": "a list",
        "tuple": "a list",
        "set": "a list",
        "dict": "a mapping of keys to values",
        "model": "a mapping of keys to values",
        "none": "no value",
    }
)
"""By the first word of pydantic's kind of error: `int_type`, `int_parsing`, `int_from_float`."""
_BOUNDS: Mapping[str, tuple[str, str]] = MappingProxyType(
    {
        "greater_than_equal": ("at least", "ge"),
        "greater_than": ("more than", "gt"),
        "less_than_equal": ("at most", "le"),
        "less_than": ("less than", "lt"),
    }
)
_SIZES: Mapping[str, tuple[str, str, str]] = MappingProxyType(
    {
        "too_short": ("at least", "min_length", "entries"),
        "too_long": ("at most", "max_length", "entries"),
        "string_too_short": ("at least", "min_length", "characters"),
        "string_too_long": ("at most", "max_length", "characters"),
    }
)
_PATTERNS: Mapping[str, str] = MappingProxyType(
    {
        r"^[A-Za-z_]\w*$": "a name of letters, digits and _ that begins with a letter",
        r"^[\w.-]+$": "a name of letters, digits, _, . and -",
    }
)
_SUBJECT = re.compile(r"^\w+( \w+)? should (be|have) |^(Value|Assertion) error, ")  # of pydantic's sentence
_PLAIN = re.compile(r"(?!~$)[\w./~+<-][\w./~+<>:-]*(?<!:)")  # text that needs no quotes anywhere
_WORDS = ("true", "false", "yes", "no", "on", "off", "null")  # that YAML does not read as text


def right_value(mistake: ErrorDetails) -> str:
    """Say what would be right in place of a value that pydantic refused.

    >>> right_value({"type": "int_type", "input": "8", "loc": (), "msg": ""})
    'a whole number, without quotes: 8'
    >>> right_value({"type": "list_type", "input": "wandb", "loc": (), "msg": ""})
    'a list, such as [wandb]'
    >>> right_value({"type": "greater_than_equal", "input": 0, "loc": (), "msg": "", "ctx": {"ge": 1}})
    'at least 1'
    """
    kind, seen, context = mistake["type"], mistake["input"], mistake.get("ctx", {})
    if kind in _BOUNDS:
        words, bound = _BOUNDS[kind]
        return f"{words} {_number(context[bound])}"
    if kind in _SIZES:
        words, bound, items = _SIZES[kind]
        if (words, context[bound]) == ("at least", 1):
            return "text that is not empty" if items == "characters" else "at least 1 entry"
        return f"{words} {context[bound]} {items}"
    if kind == "literal_error":
        words = str(context["expected"])
        return words + closest(seen, re.findall(r"'([^']*)'", words))
    if kind == "string_pattern_mismatch" and context["pattern"] in _PATTERNS:
        return _PATTERNS[context["pattern"]]
    if (right := _TYPES.get(kind.partition("_")[0])) and not kind.startswith("string_pattern"):
        return right + _remark(right, seen)
    return _SUBJECT.sub("", mistake["msg"])


def written(value: Any) -> str:
    """Return a value as YAML writes it within a list or a mapping.

    >>> written("m0"), written("a, b"), written(["x", 1]), written({"path": "m0"})
    ('m0', '"a, b"', '[x, 1]', '{path: m0}')
    """
    if isinstance(value, Mapping):
        return f"{{{', '.join(f'{written(key)}: {written(one)}' for key, one in value.items())}}}"
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(written, value))}]"
    if isinstance(value, str):
        is_plain = _PLAIN.fullmatch(value) and value.lower() not in _WORDS and isinstance(_read(value), str)
        return value if is_plain else json.dumps(value, ensure_ascii=False)
    return json.dumps(value, default=str)


def as_list(text: str) -> list[str]:
    """Return the parts of a text that was given in place of a list.

    >>> as_list("wandb, mlflow"), as_list("</s>")
    (['wandb', 'mlflow'], ['</s>'])
    """
    return [part.strip() for part in text.split(",") if part.strip()] or [text]


def _number(bound: float) -> str:
    return str(int(bound)) if isinstance(bound, float) and bound.is_integer() and abs(bound) < 1e15 else str(bound)


def closest(seen: object, words: Iterable[str]) -> str:
    """Return a hint at the word that somebody may have meant, or an empty text.

    >>> closest("flatening", ["split", "flattening"])
    '; closest: flattening'
    """
    if not isinstance(seen, str):
        return ""
    near = get_close_matches(seen[:100].lower(), list(words), 1)
    return f"; closest: {near[0]}" if near else ""


def _remark(right: str, seen: object) -> str:
    """Return a hint at the right spelling of a value; empty if its meaning is not clear."""
    if right == "text" and isinstance(seen, bool | int | float):
        return f', in quotes: "{json.dumps(seen)}"'
    if right == "a list" and isinstance(seen, str | bool | int | float):
        return f", such as {_listed(seen)}"
    if right == "a whole number" and isinstance(seen, float) and seen.is_integer():
        return f" without a point or exponent: {int(seen)}"
    if right == "a whole number" and hasattr(seen, "__index__") and not isinstance(seen, bool):
        return f", as int(...) makes of {type(seen).__name__}"
    if isinstance(seen, str) and right in ("a whole number", "a number", "true or false"):
        kinds = {"a whole number": (int,), "a number": (int, float), "true or false": (bool,)}[right]
        return f", without quotes: {seen.strip().lower()}" if type(_read(seen)) in kinds else ""
    return ""


def _listed(seen: str | float) -> str:
    parts = as_list(seen) if isinstance(seen, str) else [seen]
    return f"[{', '.join(str(part) if type(_read(part)) is not str else written(part) for part in parts)}]"


def _read(seen: object) -> object:
    """Return the number or truth value that a text looks like, or else the text."""
    if not isinstance(seen, str):
        return seen
    try:
        return json.loads(seen.strip().lower())
    except ValueError:
        return seen
