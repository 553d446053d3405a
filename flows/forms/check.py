"""Checking a flow's parameters against their types: the first mistake, in one line."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

from pydantic import TypeAdapter, ValidationError

from prefect_rlhf.placement.errors import InvalidInput


def check_parameters(signature: inspect.Signature, parameters: Mapping[str, Any]) -> None:
    """Raise InvalidInput for the first of `parameters` that is not what `signature` says."""
    for name, value in parameters.items():
        if name not in signature.parameters:
            raise InvalidInput(name, value, f"one of the parameters {', '.join(signature.parameters)}")
        try:
            TypeAdapter(signature.parameters[name].annotation).validate_python(value)
        except ValidationError as error:
            raise invalid_input(name, error) from error


def invalid_input(name: str, error: ValidationError) -> InvalidInput:
    """The first mistake that pydantic found in parameter `name`, as ours."""
    first = error.errors()[0]
    field = ".".join(str(part) for part in (name, *first["loc"]))
    cause = first.get("ctx", {}).get("error")
    if isinstance(cause, InvalidInput):
        return cause
    if first["type"] == "extra_forbidden":
        return InvalidInput(field, first["input"], "no such key: its name is misspelt, or it belongs elsewhere")
    if first["type"] == "missing":
        return InvalidInput(field, None, "a value")
    words = first["msg"].removeprefix("Input should be ")
    return InvalidInput(field, first["input"], words)
