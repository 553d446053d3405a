"""The check of a flow's parameters against their types: the first mistake, in one line."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

from pydantic import TypeAdapter, ValidationError

from prefect_rlhf.placement.errors import InvalidInput


def checked_parameters(signature: inspect.Signature, parameters: Mapping[str, Any]) -> dict[str, Any]:
    """Return `parameters` as the types of `signature`. Raises InvalidInput for the first that is not what it says."""
    checked = {}
    for name, value in parameters.items():
        if name not in signature.parameters:
            raise InvalidInput(name, value, f"one of the parameters {', '.join(signature.parameters)}")
        try:
            checked[name] = TypeAdapter(signature.parameters[name].annotation).validate_python(value)
        except ValidationError as error:
            raise invalid_input(name, error) from error
    return checked


def invalid_input(name: str, error: ValidationError) -> InvalidInput:
    """Return the first mistake that pydantic found in parameter `name` as an InvalidInput."""
    first = error.errors()[0]
    cause = first.get("ctx", {}).get("error")
    if isinstance(cause, InvalidInput):
        return cause
    field = ".".join(str(part) for part in (name, *first["loc"]))
    if first["type"] == "extra_forbidden":
        return InvalidInput(field, first["input"], "no such key: its name is misspelt, or it belongs elsewhere")
    if first["type"] == "missing":
        return InvalidInput(field, None, "a value")
    return InvalidInput(field, first["input"], first["msg"].removeprefix("Input should be "))
