"""Detects errors of a user's function that are mistakes in its code, for any rows."""

from prefect_rlhf.errors.errors import InvalidInput, RankFailed

KINDS = (AttributeError, NameError, TypeError, ImportError)
"""Errors of names, types and signatures. Made-up rows have the types of real rows, so their values do not matter."""


class Mistake(RankFailed):
    """A user's function failed for a reason that no other values can avoid."""


class DependsOnOtherRows(InvalidInput):
    """Losses whose values of a row change when the row is alone in its micro-batch; `seen` names them."""


def is_mistake(error: Exception) -> bool:
    """Whether an error does not depend on values.

    It may depend on them if the error is about None (a pattern that was not found in a made-up response), or if a name
    is bound only in some branches.

    >>> is_mistake(TypeError("f() takes 1 positional argument but 2 were given")), is_mistake(KeyError("b"))
    (True, False)
    >>> is_mistake(AttributeError("'NoneType' object has no attribute 'group'"))
    False
    """
    return isinstance(error, KINDS) and not isinstance(error, UnboundLocalError) and "NoneType" not in str(error)
