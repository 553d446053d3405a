"""What a stateful computation leaves for the next step, as JSON beside its type: to be read by people and loaded back.

No pickle: a checkpoint that runs code when it is loaded is not one to pass on.
"""

from __future__ import annotations

import json
from functools import reduce
from importlib import import_module
from typing import Any

from pydantic import PydanticUserError, TypeAdapter
from pydantic_core import PydanticSerializationError
from typing_extensions import TypedDict  # pydantic takes no other before Python 3.12

from prefect_rlhf.placement.errors import InvalidInput

_UNFIT = (PydanticUserError, PydanticSerializationError)  # of types that pydantic does not know, and of their values


class SavedState(TypedDict):
    """`type` is `module:class`."""

    type: str
    value: Any


def encode(state: object, call: str) -> SavedState:
    """`state` as JSON values. Raises InvalidInput, naming `call`, unless that gives the very same state back.

    >>> encode({"coefficient": 0.1}, "rewards")
    {'type': 'builtins:dict', 'value': {'coefficient': 0.1}}
    """
    kind = type(state)
    expected = "a dataclass or plain values that JSON can hold, annotated, so that a checkpoint can hold it"
    try:
        value = TypeAdapter[Any](kind).dump_python(state, mode="json") if state is not None else None
        saved: SavedState = {"type": f"{kind.__module__}:{kind.__qualname__}", "value": json.loads(json.dumps(value))}
        same = decode(saved) == state
    except (*_UNFIT, TypeError, ValueError, AttributeError, ImportError) as error:
        raise InvalidInput(f"state of {call}", kind.__qualname__, expected) from error
    if not same:
        raise InvalidInput(f"state of {call}", kind.__qualname__, expected)
    return saved


def decode(saved: SavedState) -> Any:
    """The state that `encode` was given.

    >>> decode({"type": "builtins:dict", "value": {"coefficient": 0.1}})
    {'coefficient': 0.1}
    """
    if saved["value"] is None:
        return None
    module, _, name = saved["type"].partition(":")
    kind: Any = reduce(getattr, name.split("."), import_module(module))
    return TypeAdapter[Any](kind).validate_python(saved["value"])
