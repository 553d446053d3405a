"""Tool schemas, as Transformers makes them for chat templates, and checks that a call fits its schema."""

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from prefect_rlhf.engines.functions.load import at
from prefect_rlhf.engines.functions.signatures.first_use import package
from prefect_rlhf.errors.errors import InvalidInput
from prefect_rlhf.errors.in_short import in_short

_TYPES: Mapping[str, tuple[type, ...]] = {
    "string": (str,),
    "integer": (int,),
    "number": (int, float),
    "boolean": (bool,),
    "array": (list,),
    "object": (dict,),
    "null": (type(None),),
}


def schema_of(tool: Callable[..., Any], field: str, name: str, place: str) -> Mapping[str, Any]:
    """Return a function's JSON schema. Raises InvalidInput if types, or docstrings of arguments, are missing."""
    writer = package("transformers.utils", "transformers, which writes the schemas of tools")
    try:
        schema: Mapping[str, Any] = writer.get_json_schema(tool)
    except Exception as error:
        first = next(iter(str(error).splitlines()), type(error).__name__)
        right = "a function with types, and a docstring that describes it and each argument below `Args:`"
        raise InvalidInput(field, name, at(f"{right}; {first}", place)) from error
    if any(each.kind is each.VAR_KEYWORD for each in inspect.signature(tool).parameters.values()):
        raise InvalidInput(field, name, at("a function without **arguments, which no schema describes", place))
    return schema


def misfit(arguments: Mapping[str, Any], parameters: Mapping[str, Any]) -> str:
    """Return why arguments do not fit a schema's `parameters`; empty if they fit.

    >>> of_add = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
    >>> misfit({"a": 1}, of_add), misfit({"a": "1"}, of_add), misfit({}, of_add), misfit({"a": 1, "b": 2}, of_add)
    ('', "a is '1', expected integer", 'a is missing', 'there is no argument b; there is a')
    >>> misfit({"b": 2}, {"additionalProperties": True}), misfit({"b": 2}, {"additionalProperties": {"type": "string"}})
    ('', 'b is 2, expected string')
    """
    properties: Mapping[str, Any] = parameters.get("properties") or {}
    for name in parameters.get("required") or ():
        if name not in arguments:
            return f"{name} is missing"
    others: Mapping[str, Any] | bool = parameters.get("additionalProperties", False)
    for name, value in arguments.items():
        if name not in properties and others is False:
            return f"there is no argument {name}; there is {', '.join(properties) or 'none'}"
        schema = properties.get(name, others)
        if not _fits(value, schema):
            return f"{name} is {in_short(value)}, expected {_described(schema)}"
    return ""


def _fits(value: Any, schema: Mapping[str, Any] | bool) -> bool:
    """Whether a JSON value fits a schema of `get_json_schema`: types, enums, alternatives, items and properties."""
    if isinstance(schema, bool):  # JSON schema's "any value" and "no value"
        return schema
    if value is None and schema.get("nullable"):
        return True
    if "anyOf" in schema:
        return any(_fits(value, each) for each in schema["anyOf"])
    if "enum" in schema and value not in schema["enum"]:
        return False
    types = schema.get("type")
    names: Sequence[str] = [types] if isinstance(types, str) else types or ()
    if names and not any(_is(value, name) for name in names):
        return False
    if isinstance(value, list) and "items" in schema:
        return all(_fits(each, schema["items"]) for each in value)
    return True


def _is(value: Any, name: str) -> bool:
    if isinstance(value, bool):  # an int for Python, not for JSON
        return name == "boolean"
    return isinstance(value, _TYPES.get(name, (object,)))


def _described(schema: Mapping[str, Any]) -> str:
    if "enum" in schema:
        return " or ".join(map(repr, schema["enum"]))
    alternatives = [_described(each) for each in schema.get("anyOf", ())]
    types = schema.get("type")
    names = alternatives or ([types] if isinstance(types, str) else list(types or ()))
    return " or ".join([*names, *(["null"] if schema.get("nullable") else [])])
