"""A stateful computation's state for the next step, as JSON with its type, so people can read it and it can be loaded.

It is not pickled, because a checkpoint that runs code when it is loaded is unsafe to share.
"""

import json
from typing import Any

from pydantic import PydanticUserError, TypeAdapter
from pydantic_core import PydanticSerializationError
from typing_extensions import TypedDict  # pydantic takes no other before Python 3.12

from prefect_rlhf.engines.compute import STATE_TYPES
from prefect_rlhf.errors.errors import InvalidInput

_PLAIN: dict[str, type] = {kind.__name__: kind for kind in (bool, int, float, str, list, tuple, dict)}
_UNFIT = (PydanticUserError, PydanticSerializationError)  # of types that pydantic does not know, and of their values


class SavedState(TypedDict):
    """`type` is the name of a plain type or of a registered dataclass."""

    type: str
    value: Any


def encode(state: object, call: str) -> SavedState:
    """Return `state` as JSON values. Raises InvalidInput, naming `call`, unless they restore an equal state.

    >>> encode({"coefficient": 0.1}, "rewards")
    {'type': 'dict', 'value': {'coefficient': 0.1}}
    """
    kind = type(state)
    expected = "a dataclass with @saved_state or plain values, annotated, so that a checkpoint can hold it as JSON"
    try:
        value = TypeAdapter[Any](kind).dump_python(state, mode="json") if state is not None else None
        saved: SavedState = {"type": kind.__name__, "value": json.loads(json.dumps(value))}
        restored = decode(saved)
    except (*_UNFIT, TypeError, ValueError) as error:
        raise InvalidInput(f"state of {call}", kind.__qualname__, expected) from error
    if type(restored) is not kind or restored != state:
        raise InvalidInput(f"state of {call}", kind.__qualname__, expected)
    return saved


def decode(saved: SavedState) -> Any:
    """Return the state that was passed to `encode`. Raises GraphError for a type that no imported module registers.

    >>> decode({"type": "dict", "value": {"coefficient": 0.1}})
    {'coefficient': 0.1}
    """
    if saved["value"] is None:
        return None
    name = saved["type"]
    kind: Any = _PLAIN[name] if name in _PLAIN else STATE_TYPES.find(name)
    return TypeAdapter[Any](kind).validate_python(saved["value"])
