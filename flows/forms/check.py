"""Checks a flow's parameters against their types and reports the first mistake in a single line."""

import inspect
import json
from collections.abc import Mapping, Sequence
from typing import Any

from pydantic import BaseModel, ConfigDict, PydanticUserError, TypeAdapter, ValidationError
from pydantic_core import ErrorDetails

from prefect_rlhf.errors.errors import InvalidInput, Missing, UnknownKey
from prefect_rlhf.errors.right_value import right_value
from prefect_rlhf.errors.wrong_setting import known_mistake, without_branches
from prefect_rlhf.flows.forms.left_out import refuse_left_out
from prefect_rlhf.flows.forms.shape import group_in_words, shape_of, types_at
from prefect_rlhf.flows.forms.unknown_key import Has, has_parameter, hint, keys_at, meaning, several, unknown_parameters

STRICT = ConfigDict(strict=True, allow_inf_nan=False)  # for types that have no configuration of their own


def checked_parameters(signature: inspect.Signature, parameters: Mapping[str, Any]) -> dict[str, Any]:
    """Return `parameters` converted to the types of `signature`; unnamed settings of a group keep their defaults.

    Raises InvalidInput for the first value of a wrong type, and for missing parameters.
    """
    if others := {str(name): value for name, value in parameters.items() if name not in signature.parameters}:
        raise unknown_parameters(others, signature)
    checked = {}
    for name, value in parameters.items():
        checked[name] = checked_value(signature.parameters[name], value, has_parameter(signature))
    empty = inspect.Parameter.empty
    missing = [name for name, each in signature.parameters.items() if each.default is empty and name not in checked]
    if missing:
        shape = shape_of(types_at(signature.parameters[missing[0]].annotation, ()), None)
        such = f", such as {missing[0]}: {shape}" if shape else ""
        one = "a value, since it has no default" if len(missing) == 1 else "a value for each: they have no default"
        raise Missing(", ".join(missing), one + such)
    return checked


def checked_value(parameter: inspect.Parameter, value: Any, has: Has | None = None) -> Any:
    """Convert a value to its parameter's type. Raises InvalidInput for the first mistake."""
    refuse_left_out(parameter.name, value)
    try:
        return _validated(parameter.name, parameter.annotation, completed(parameter.default, value))
    except ValidationError as error:
        raise invalid_input(parameter.name, error, value, parameter.annotation, has) from error


def completed(default: Any, value: Any) -> Any:
    """Fill in a settings group from `default`; return any other value unchanged.

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


def invalid_input(
    name: str, error: ValidationError, value: Any, annotation: Any, has: Has | None = None
) -> InvalidInput:
    """Return the first mistake that pydantic found in the parameter `name`, set to `value`, as an InvalidInput.

    Unknown keys are all reported together. With `has`, corrections name only parameters that this flow has.
    """
    first = error.errors()[0]
    field = ".".join((name, *without_branches(first["loc"])))
    if (known := known_mistake(field, first)) is not None:
        return known
    if first["type"] == "extra_forbidden":
        unknown = [each for each in error.errors() if each["type"] == "extra_forbidden"]
        return several([_unknown_key(name, each, annotation, has) for each in unknown])
    seen = _given(value, first["loc"], first["input"])
    right = _right(first, types_at(annotation, first["loc"]), seen)
    meant = meaning(field, first["input"], has) if "literal" in first["type"] else ""
    return InvalidInput(field, seen, "; ".join(filter(None, (right, meant))))


def _right(mistake: ErrorDetails, types: Sequence[Any], seen: Any) -> str:
    """Say what would be right in place of a value of these types; for a group or a list, how `seen` belongs in it."""
    if mistake["type"] in ("model_type", "model_attributes_type", "dict_type"):
        return group_in_words(types, seen) or right_value(mistake)
    if mistake["type"] in ("list_type", "tuple_type") and (shape := shape_of(types, seen)):
        return f"a list, such as {shape}"
    return right_value(mistake)


def _unknown_key(name: str, error: Any, annotation: Any, has: Has | None) -> UnknownKey:
    place = without_branches(error["loc"])
    return UnknownKey(
        ".".join((name, *place)), error["input"], hint(place[-1], keys_at(annotation, place[:-1]), has=has)
    )


def _given(value: Any, place: Sequence[int | str], seen: Any) -> Any:
    """Return the part of `value` at `place`, without the defaults that complete it, or else `seen`."""
    for key in place:
        if not isinstance(value, Mapping) or key not in value:
            return seen
        value = value[key]
    return value if isinstance(value, Mapping) else seen
