"""Checks a flow's parameters against their types and reports the first mistake in a single line."""

import inspect
import json
from collections.abc import Mapping, Sequence
from difflib import get_close_matches
from typing import Any

from pydantic import BaseModel, ConfigDict, PydanticUserError, TypeAdapter, ValidationError
from pydantic_core import ErrorDetails

from prefect_rlhf.errors.errors import InvalidInput, Missing, NotUsed, UnknownKey
from prefect_rlhf.errors.in_short import MOST_CHARACTERS
from prefect_rlhf.errors.right_value import right_value
from prefect_rlhf.errors.wrong_setting import NOT_USED, WRONG
from prefect_rlhf.flows.forms.foreign_options import answer
from prefect_rlhf.flows.forms.shape import group_in_words, keys_of, shape_of, types_at, without_branches

MOST_PARTS = 8  # of the path of another trainer's option
SAME_WORD = 0.7  # similarity above which the name of a group is a misspelt name of ours
STRICT = ConfigDict(strict=True, allow_inf_nan=False)  # for types that have no configuration of their own


def checked_parameters(signature: inspect.Signature, parameters: Mapping[str, Any]) -> dict[str, Any]:
    """Return `parameters` converted to the types of `signature`; unnamed settings of a group keep their defaults.

    Raises InvalidInput for the first value of a wrong type, and for missing parameters.
    """
    checked = {}
    for name, value in parameters.items():
        if name not in signature.parameters:
            raise UnknownKey(str(name), value, hint(_first_path(name, value), list(signature.parameters), "parameters"))
        try:
            parameter = signature.parameters[name]
            checked[name] = _validated(name, parameter.annotation, completed(parameter.default, value))
        except ValidationError as error:
            raise invalid_input(name, error, value, parameter.annotation) from error
    empty = inspect.Parameter.empty
    missing = [name for name, each in signature.parameters.items() if each.default is empty and name not in checked]
    if missing:
        shape = shape_of(types_at(signature.parameters[missing[0]].annotation, ()), None)
        such = f", such as {missing[0]}: {shape}" if shape else ""
        what = (
            "a value, since it has no default" if len(missing) == 1 else "a value for each, since they have no default"
        )
        raise Missing(", ".join(missing), what + such)
    return checked


def completed(default: Any, value: Any) -> Any:
    """Return a group of settings, completed from `default`; any other value is returned unchanged.

    For example, a flow's own `algo: PPO = PPO(batch_size=8)` keeps its 8 rows if a file sets another key of `algo`.
    """
    if not isinstance(default, BaseModel) or not isinstance(value, Mapping):
        return value
    named = {key: completed(getattr(default, str(key), None), one) for key, one in value.items()}
    return {**default.model_dump(mode="json"), **named}


def _validated(name: str, annotation: Any, value: Any) -> Any:
    """Convert a value to its type strictly; a plain value is validated as JSON, since a server stores it so."""
    try:
        adapter = TypeAdapter[Any](annotation, config=STRICT)
    except PydanticUserError:  # a model has its own configuration
        adapter = TypeAdapter[Any](annotation)
    try:
        text = json.dumps(value, ensure_ascii=False).encode()
    except UnicodeEncodeError as error:
        raise InvalidInput(name, value, "valid Unicode text, without lone surrogates") from error
    except RecursionError as error:
        raise InvalidInput(name, "endlessly nested groups", "fewer levels") from error
    except (TypeError, ValueError):  # it contains typed values, or a number that JSON lacks
        return adapter.validate_python(value)
    if b"\\u0000" in text and (field := _with_nul(name, value)):
        raise InvalidInput(field, "a text with NUL", "text without NUL characters")
    return adapter.validate_json(text)


def _with_nul(field: str, value: Any) -> str | None:
    """Return the field of the first text or key with a NUL character: no path, variable or database can have it."""
    if isinstance(value, str):
        return field if "\0" in value else None
    if isinstance(value, Mapping):
        if any("\0" in str(key) for key in value):
            return field
        return next((found for key, one in value.items() if (found := _with_nul(f"{field}.{key}", one))), None)
    if isinstance(value, list | tuple):
        return next((found for number, one in enumerate(value) if (found := _with_nul(f"{field}.{number}", one))), None)
    return None


def invalid_input(name: str, error: ValidationError, value: Any, annotation: Any) -> InvalidInput:
    """Return the first mistake that pydantic found in the parameter `name`, set to `value`, as an InvalidInput."""
    first = error.errors()[0]
    cause = first.get("ctx", {}).get("error")
    if isinstance(cause, InvalidInput):
        return cause
    field = ".".join((name, *without_branches(first["loc"])))
    if first["type"] == WRONG:
        inner, expected = first["ctx"]["field"], first["ctx"]["expected"]
        return InvalidInput(f"{field}.{inner}", _at(first["input"], inner.split(".")), expected)
    if first["type"] == NOT_USED:
        inner, reason, remedy = (first["ctx"][key] for key in ("field", "reason", "remedy"))
        return NotUsed(f"{field}.{inner}", _at(first["input"], inner.split(".")), reason, remedy)
    if first["type"] == "extra_forbidden":
        return UnknownKey(
            field, first["input"], hint(str(first["loc"][-1]), keys_of(types_at(annotation, first["loc"][:-1])))
        )
    if first["type"] == "missing":
        return Missing(field, "a value, since it has no default")
    seen = _given(value, first["loc"], first["input"])
    return InvalidInput(field, seen, _right(first, types_at(annotation, first["loc"]), seen))


def _right(mistake: ErrorDetails, types: Sequence[Any], seen: Any) -> str:
    """Say what would be right in place of a value of these types; for a group or a list, how `seen` belongs in it."""
    if mistake["type"] in ("model_type", "model_attributes_type", "dict_type"):
        return group_in_words(types, seen) or right_value(mistake)
    if mistake["type"] in ("list_type", "tuple_type") and (shape := shape_of(types, seen)):
        return f"a list, such as {shape}"
    return right_value(mistake)


def hint(word: str, keys: Sequence[str], noun: str = "keys") -> str:
    """Return the correction for an unknown key: its replacement here, the closest of `keys`, or all of them.

    `word` may be the path of another trainer's option: `actor_rollout_ref.actor.optim.lr` is answered as `optim.lr`.
    """
    parts = word[:MOST_CHARACTERS].split(".")
    near = get_close_matches(parts[0], keys)
    if len(parts) == 1 or not get_close_matches(parts[0], keys, cutoff=SAME_WORD):
        for start in range(len(parts)):
            if foreign := answer(".".join(parts[start:])):
                return f"here: {foreign}"
    return f"closest: {', '.join(near)}" if near else f"the {noun} are {', '.join(keys)}"


def _first_path(name: object, value: Any) -> str:
    """Return the dotted path to the first value of a group that another trainer has, or else the name of a value.

    >>> _first_path("algorithm", {"kl_ctrl": {"kl_coef": 0.1}})
    'algorithm.kl_ctrl.kl_coef'
    """
    parts = [str(name)]
    while isinstance(value, Mapping) and value and len(parts) < MOST_PARTS:
        name, value = next(iter(value.items()))
        parts.append(str(name))
    return ".".join(parts)


def _at(group: Any, path: Sequence[str]) -> Any:
    """Return the value at a path within groups, which are mappings or settings; None if the path does not exist."""
    for key in path:
        group = group.get(key) if isinstance(group, Mapping) else getattr(group, key, None)
    return group


def _given(value: Any, place: Sequence[int | str], seen: Any) -> Any:
    """Return the part of `value` at `place`, without the defaults that complete it, or else `seen`."""
    for key in place:
        if not isinstance(value, Mapping) or key not in value:
            return seen
        value = value[key]
    return value if isinstance(value, Mapping) else seen
