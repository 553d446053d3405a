"""Which errors of a person's function are mistakes in its code, whatever rows it is given."""

from __future__ import annotations

from prefect_rlhf.placement.errors import RankFailed

KINDS = (AttributeError, NameError, TypeError, ImportError)
"""Errors of names, types and signatures. Made-up rows have the types that real ones have, so values play no part."""


class Mistake(RankFailed):
    """A person's function failed for a reason that no values can cure."""


def is_mistake(error: Exception) -> bool:
    """Whether an error does not depend on values.

    It may where None is the reason (a pattern that was not found in a made-up response), and where a name is bound in
    some branches alone.

    >>> is_mistake(TypeError("f() takes 1 positional argument but 2 were given")), is_mistake(KeyError("b"))
    (True, False)
    >>> is_mistake(AttributeError("'NoneType' object has no attribute 'group'"))
    False
    """
    return isinstance(error, KINDS) and not isinstance(error, UnboundLocalError) and "NoneType" not in str(error)
