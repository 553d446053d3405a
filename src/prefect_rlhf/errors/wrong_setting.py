"""The errors with which a group of settings refuses a field because of another field."""

from pydantic_core import PydanticCustomError

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
