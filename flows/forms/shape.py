"""Describes the shape of a parameter's value in messages: how to write a value that belongs in a group or a list."""

import re
from collections.abc import Iterator, Mapping, Sequence
from types import UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic import BaseModel

from prefect_rlhf.errors.right_value import written
from prefect_rlhf.errors.wrong_setting import without_branches

MAIN = ("path", "function")
"""Fields that may stand for their whole group: `actor: m0` means its path."""
MOST_KEYS = 8
_IS_FUNCTION = re.compile(r"[\w./-]+:\w+")


def types_at(annotation: Any, place: Sequence[int | str]) -> list[Any]:
    """Return the possible types of a field, item or mapping value within a type."""
    found = list(_options(annotation))
    for key in without_branches(place):
        found = [one for kind in found for inner in _inside(kind, key) for one in _options(inner)]
    return found


def keys_of(types: Sequence[Any]) -> list[str]:
    """Return the fields of all settings groups among some types."""
    return list(dict.fromkeys(name for kind in types if _is_group(kind) for name in kind.model_fields))


def shape_of(types: Sequence[Any], seen: Any) -> str:
    """Return how to write a value of one of these types, with `seen` in it; empty if that can't be guessed.

    >>> from prefect_rlhf.blocks.model import Model
    >>> shape_of([Model], "m0"), shape_of([dict[str, float]], 1800), shape_of([list[Literal["a", "b"]]], "x")
    ('{path: m0}', '{NAME: 1800}', '[a]')
    """
    one = seen[0] if isinstance(seen, list) and len(seen) == 1 else seen
    shapes = [shape for kind in types if (shape := _shape(kind, one))]
    if isinstance(one, str) and _IS_FUNCTION.fullmatch(one):
        shapes.sort(key=lambda shape: "function:" not in shape)
    return shapes[0] if shapes else ""


def _shape(kind: Any, seen: Any) -> str:
    arguments = get_args(kind)
    if get_origin(kind) is dict and len(arguments) == 2:
        types = list(_options(arguments[1]))
        return f"{{NAME: {shape_of(types, seen) or _plain(types, seen)}}}"
    if get_origin(kind) in (list, tuple) and arguments:
        words = [word for one in _options(arguments[0]) if get_origin(one) is Literal for word in get_args(one)]
        return f"[{written(words[0])}]" if words and seen not in words else ""
    if not _is_group(kind):
        return ""
    fields = kind.model_fields
    main = next((name for name in MAIN if name in fields), None)
    if main is not None:
        return f"{{{main}: {written(seen) if isinstance(seen, str) else '...'}}}"
    required = [name for name, field in fields.items() if field.is_required()]
    if len(required) == 1 and (inner := shape_of(list(_options(fields[required[0]].annotation)), seen)):
        return f"{{{required[0]}: {inner}}}"
    return ""


def _plain(types: Sequence[Any], seen: Any) -> str:
    is_number = any(kind in (int, float) for kind in types)
    if isinstance(seen, str):
        return "NUMBER" if is_number else written(seen)
    return written(seen) if isinstance(seen, int | float) and not isinstance(seen, bool) else "VALUE"


def group_in_words(types: Sequence[Any], seen: Any) -> str:
    """Describe the right value, if a group or a mapping was expected.

    >>> from prefect_rlhf.tasks.settings import Update
    >>> group_in_words([Update], 2)
    'a mapping with the keys epochs, mini_batches'
    """
    if shape := shape_of(types, seen):
        return f"a mapping, such as {shape}"
    keys = keys_of(types)
    named = ", ".join(keys[:MOST_KEYS]) + (", ..." if len(keys) > MOST_KEYS else "")
    return f"a mapping with the keys {named}" if keys else ""


def _is_group(kind: Any) -> bool:
    return isinstance(kind, type) and issubclass(kind, BaseModel)


def _options(annotation: Any) -> Iterator[Any]:
    """Yield the types of a union, without their annotations."""
    if get_origin(annotation) is Annotated:
        yield from _options(get_args(annotation)[0])
    elif get_origin(annotation) in (Union, UnionType):
        for part in get_args(annotation):
            yield from _options(part)
    else:
        yield annotation


def _inside(kind: Any, key: str) -> Iterator[Any]:
    """Yield the types at a key of a type."""
    arguments = get_args(kind)
    if _is_group(kind):
        if key in kind.model_fields:
            yield kind.model_fields[key].annotation
    elif isinstance(get_origin(kind), type) and issubclass(get_origin(kind), Mapping):
        yield arguments[-1]
    elif arguments and key.isdigit():
        yield arguments[min(int(key), len(arguments) - 1)] if arguments[-1] is not Ellipsis else arguments[0]
