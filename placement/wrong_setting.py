"""The error with which a group of settings refuses one of its fields because of another."""

from __future__ import annotations

from pydantic_core import PydanticCustomError

WRONG = "wrong_setting"
"""The kind of an error of `wrong`."""


def wrong(field: str, expected: str) -> PydanticCustomError:
    """Return the error with which a validator of a group refuses a field of it, at a dotted path, beside the others."""
    return PydanticCustomError(WRONG, "{field}: {expected}", {"field": field, "expected": expected})
