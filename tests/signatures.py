"""Signatures and types as text, as a person would write them: without bounds, defaults in a few words."""

import inspect
import types
import typing
from typing import Annotated, Any, Literal

from pydantic import BaseModel


def called(name: str, signature: inspect.Signature) -> str:
    """Return a function as it is called, with types, over several lines if it is long."""
    parts, kinds = [], [one.kind for one in signature.parameters.values()]
    for place, one in enumerate(signature.parameters.values()):
        if one.kind is one.KEYWORD_ONLY and one.KEYWORD_ONLY not in kinds[:place] and one.VAR_POSITIONAL not in kinds:
            parts.append("*")
        stars = {one.VAR_POSITIONAL: "*", one.VAR_KEYWORD: "**"}.get(one.kind, "")
        typed = "" if one.annotation is one.empty else f": {type_text(one.annotation)}"
        default = "" if one.default is one.empty else f" = {default_text(one.default, quoted=True)}"
        parts.append(f"{stars}{one.name}{typed}{default}")
        if one.kind is one.POSITIONAL_ONLY and kinds[place + 1 :][:1] != [one.POSITIONAL_ONLY]:
            parts.append("/")
    parts = [part for part in parts if part not in ("self", "cls")]
    result = signature.return_annotation
    after = "" if result is signature.empty else f" -> {type_text(result)}"
    line = f"{name}({', '.join(parts)}){after}"
    return line if len(line) <= 100 else f"{name}(\n    " + ",\n    ".join(parts) + f"\n){after}"


def default_text(value: Any, quoted: bool = False) -> str:
    """Return a default in a few words: of settings only the fields that differ from their own defaults."""
    if isinstance(value, BaseModel):
        stated = value.model_dump(exclude_defaults=True)
        return f"{type(value).__name__}({', '.join(f'{key}={one!r}' for key, one in stated.items())})"
    return repr(value) if quoted or not isinstance(value, str) else f'"{value}"'


def type_text(annotation: Any) -> str:
    """Return a type as it is written, without bounds."""
    if isinstance(annotation, str):
        return annotation.strip("'")
    if annotation is None or annotation is types.NoneType:
        return "None"
    origin, arguments = typing.get_origin(annotation), typing.get_args(annotation)
    if origin is Annotated:
        return type_text(arguments[0])
    if origin is Literal:
        return " | ".join(map(repr, arguments))
    if origin in (typing.Union, types.UnionType):
        return " | ".join(type_text(one) for one in arguments)
    if origin is not None and arguments:
        inner = ["..." if one is Ellipsis else type_text(one) for one in arguments]
        return f"{getattr(origin, '__name__', origin)}[{', '.join(inner)}]"
    return getattr(annotation, "__name__", str(annotation))
