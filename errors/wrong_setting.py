"""Errors of pydantic: how a group of settings refuses a field, and how a file's wrong key becomes our error."""

from collections.abc import Iterator
from contextlib import contextmanager

from pydantic_core import PydanticCustomError, ValidationError

from prefect_rlhf.errors.errors import InvalidInput

WRONG = "wrong_setting"
"""The kind of an error of `wrong`."""
NOT_USED = "setting_not_used"
"""The kind of an error of `not_used`."""


def wrong(field: str, expected: str) -> PydanticCustomError:
    """Return the error with which a validator of a group refuses a field, at a dotted path, along with other errors."""
    return PydanticCustomError(WRONG, "{field}: {expected}", {"field": field, "expected": expected})


def not_used(field: str, reason: str, remedy: str = "") -> PydanticCustomError:
    """Return the error with which a validator of a group refuses a field that another field leaves without effect."""
    words = {"field": field, "reason": reason, "remedy": remedy}
    text = "{field} is not used: {reason}; remove it" + (", or {remedy}" if remedy else "")
    return PydanticCustomError(NOT_USED, text, words)


@contextmanager
def refusing_invalid(field: str, expected: str) -> Iterator[None]:
    """Convert the body's ValidationError to an InvalidInput that names its first wrong key below `field`."""
    try:
        yield
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        where = ".".join((field, *(str(part) for part in first["loc"])))
        raise InvalidInput(where, first["msg"], expected) from error
