"""Pydantic's errors: how a settings group refuses a field, and how a file's wrong key becomes our error."""

import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from pydantic_core import ErrorDetails, PydanticCustomError, ValidationError

from prefect_rlhf.errors.errors import InvalidInput, Missing, NotUsed

WRONG = "wrong_setting"
"""The kind of `wrong`'s error."""
_BRANCH = re.compile(r"<.*|[a-z-]*\[.*\]")  # a branch of a union, in pydantic's location of an error
NOT_USED = "setting_not_used"
"""The kind of `not_used`'s error."""


def wrong(group: Any, field: str, expected: str) -> PydanticCustomError:
    """Return a validator's error for a field at a dotted path in a group, to be raised along with other errors.

    The error shows the value as it was given, or else the field's default, which the group holds.
    """
    seen = _at(group, field.split("."))
    return PydanticCustomError(WRONG, "{field}: {expected}", {"field": field, "expected": expected, "seen": seen})


def not_used(field: str, reason: str, remedy: str = "") -> PydanticCustomError:
    """Return a validator's error for a field of a group that another field leaves without effect."""
    words = {"field": field, "reason": reason, "remedy": remedy}
    text = "{field} is not used: {reason}; remove it" + (", or {remedy}" if remedy else "")
    return PydanticCustomError(NOT_USED, text, words)


def known_mistake(field: str, mistake: ErrorDetails) -> InvalidInput | None:
    """Return the error for a mistake that pydantic found at `field`, if its text is ours; else None."""
    cause = mistake.get("ctx", {}).get("error")
    if isinstance(cause, InvalidInput):
        return cause
    if mistake["type"] == WRONG:
        inner, expected, seen = (mistake["ctx"][key] for key in ("field", "expected", "seen"))
        given = _at(mistake["input"], inner.split("."))
        return InvalidInput(f"{field}.{inner}", seen if given is None else given, expected)
    if mistake["type"] == NOT_USED:
        inner, reason, remedy = (mistake["ctx"][key] for key in ("field", "reason", "remedy"))
        return NotUsed(f"{field}.{inner}", _at(mistake["input"], inner.split(".")), reason, remedy)
    return Missing(field, "a value, since it has no default") if mistake["type"] == "missing" else None


def without_branches(place: Sequence[int | str]) -> list[str]:
    """Return a pydantic location as words, without the branches of unions."""
    return [str(part) for part in place if not _BRANCH.fullmatch(str(part))]


def _at(group: Any, path: Sequence[str]) -> Any:
    """Return the value at a path within groups, which are mappings or settings; None if the path does not exist."""
    for key in path:
        group = group.get(key) if isinstance(group, Mapping) else getattr(group, key, None)
    return group


@contextmanager
def refusing_invalid(field: str, expected: str) -> Iterator[None]:
    """Convert the body's ValidationError to an InvalidInput that names its first wrong key below `field`."""
    try:
        yield
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        where = ".".join((field, *(str(part) for part in first["loc"])))
        raise InvalidInput(where, first["msg"], expected) from error
