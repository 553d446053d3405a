"""Reads workers' messages in the pool: each field has exactly its stated type, and every number is finite."""

from collections.abc import Callable
from typing import Any, TypeVar, get_args

from pydantic import TypeAdapter

Said = TypeVar("Said")


def reader_of(messages: Any) -> Callable[[bytes], Any]:
    """Return a function that reads a line of `line_of`, a message of a union.

    It raises ValueError for any other line, because a user's function may write to the same socket. pydantic checks in
    strict mode; a message's own `__post_init__` may check more.

    >>> from prefect_rlhf.engines.functions.message import line_of
    >>> from prefect_rlhf.engines.functions.scoring.messages import Begun, Said
    >>> reader_of(Said)(line_of(Begun(3)))
    Begun(call=3)
    """
    adapters = {kind.__name__: TypeAdapter(kind) for kind in get_args(messages)}

    def read(line: bytes) -> Any:
        name, _, fields = line.partition(b" ")
        try:
            return adapters[name.decode()].validate_json(fields)
        except (ValueError, TypeError, KeyError) as error:
            raise ValueError("no message of a worker") from error

    return read
