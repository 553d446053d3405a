"""Limits a form to values that a Prefect server can store: its schema refuses all others, before the run exists.

A server would store half a surrogate pair in a text, or a number of 2^64, but then each of its lists would fail, so
that no worker of the pool would get a run. PostgreSQL refuses NUL in a text.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from pydantic import GetJsonSchemaHandler
from pydantic.json_schema import JsonSchemaValue
from pydantic_core import CoreSchema

TEXT = r"^[^\ud800-\udfff\u0000]*$"
"""A pattern of texts without half a surrogate pair and without NUL."""
MOST_IN_JSON = 2**63 - 1
LEVELS = 5
"""Groups within groups of a value of any type. No schema refers to itself: a form could hang."""
_TYPED = ("type", "$ref", "anyOf", "allOf", "oneOf", "enum", "const")
_PARTS = ("items", "additionalProperties")


class Storable:
    """Metadata for a parameter: its schema gets a pattern for each text and key, and bounds for each number."""

    def __get_pydantic_json_schema__(self, core: CoreSchema, handler: GetJsonSchemaHandler) -> JsonSchemaValue:
        return storable(handler(core), handler.resolve_ref_schema)


def storable(schema: JsonSchemaValue, resolve: Callable[[JsonSchemaValue], JsonSchemaValue]) -> JsonSchemaValue:
    """Limit a schema and all its parts to values that a server can store, and return it; `resolve` follows `$ref`.

    >>> storable({"type": "array", "items": {"type": "string"}}, dict)["items"]["pattern"] == TEXT
    True
    """
    seen: set[int] = set()
    waiting = [schema]
    while waiting:
        part = waiting.pop()
        if id(part) not in seen:
            seen.add(id(part))
            _limit(part)
            waiting += _parts(part)
            waiting += [resolve(part)] if "$ref" in part else []
    return schema


def _parts(schema: dict[str, Any]) -> Iterator[dict[str, Any]]:
    for name in ("properties", "patternProperties"):
        yield from schema.get(name, {}).values()
    for name in ("anyOf", "allOf", "oneOf", "prefixItems"):
        yield from schema.get(name, ())
    yield from (schema[name] for name in _PARTS if isinstance(schema.get(name), dict))


def _limit(schema: dict[str, Any]) -> None:
    """Limit the texts, keys and numbers of a schema, but not of its parts."""
    kind = schema.get("type")
    if not any(name in schema for name in _TYPED):
        schema |= any_value() | schema
    elif kind == "string" and "enum" not in schema and "const" not in schema:
        schema.setdefault("pattern", TEXT)
    elif kind in ("integer", "number"):
        for bound, other, most in (("maximum", "exclusiveMaximum", 1), ("minimum", "exclusiveMinimum", -1)):
            if other not in schema:
                schema.setdefault(bound, most * MOST_IN_JSON)
    elif kind == "object" and schema.get("additionalProperties", "properties" not in schema) is not False:
        schema.setdefault("propertyNames", {}).setdefault("pattern", TEXT)
        if not isinstance(schema.get("additionalProperties"), dict):
            schema["additionalProperties"] = any_value()
    elif kind == "array" and not any(name in schema for name in ("items", "prefixItems")):
        schema["items"] = any_value()


def any_value(levels: int = LEVELS) -> dict[str, Any]:
    """Return a schema for any JSON value with at most `levels` levels of groups. Each keyword applies to its own
    type.
    """
    if levels == 0:
        return {"type": ["string", "number", "boolean", "null"], **_SCALAR}
    below = any_value(levels - 1)
    return {**_SCALAR, "items": below, "additionalProperties": below, "propertyNames": {"pattern": TEXT}}


_SCALAR: dict[str, Any] = {"pattern": TEXT, "maximum": MOST_IN_JSON, "minimum": -MOST_IN_JSON}
