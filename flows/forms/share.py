"""A share between 0 and 1, as a number or as a percentage."""

import re
from typing import Annotated

from pydantic import BeforeValidator, Field, WithJsonSchema

from prefect_rlhf.placement.devices.mesh import MOST_ROOM


def read_share(value: object) -> object:
    """Convert a percentage such as "5%" to a number; return any other value unchanged.

    >>> read_share("12.5%"), read_share(0.1), read_share("ten")
    (0.125, 0.1, 'ten')
    """
    if isinstance(value, str) and (match := re.fullmatch(r"\s*([0-9]{1,9}(?:\.[0-9]{1,9})?)\s*%\s*", value)):
        return float(match[1]) / 100
    return value


MOST_SHARE = MOST_ROOM  # of a step's time too: with more, a plan would say nothing about speed
# The bounds follow the validator, so that a mistake names the text as it was typed. Then pydantic's schema lacks them.
Share = Annotated[
    float,
    BeforeValidator(read_share),
    Field(ge=0, le=MOST_SHARE),
    WithJsonSchema({"type": "number", "minimum": 0, "maximum": MOST_SHARE}),
]
