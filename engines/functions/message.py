"""The encoding of messages: pickles to a worker, lines of JSON back, a line per event.

If a worker dies within a line, the incomplete line is dropped. A worker's messages are never unpickled.
"""

import json
import pickle
import struct
from asyncio import StreamReader
from dataclasses import asdict, dataclass
from typing import IO, Any

_LENGTH = struct.Struct(">Q")


class Message:
    """A worker's message, or a part of it. The pool reads it with pydantic, which a worker does not import."""

    __slots__ = ()
    __pydantic_config__ = {"strict": True, "extra": "forbid", "allow_inf_nan": False}


@dataclass(frozen=True, slots=True)
class Refused(Message):
    """A function cannot be used: the field that names it, the value seen, and the expected value."""

    field: str
    seen: str
    expected: str


def packed(message: object) -> bytes:
    """Return a message to a worker as bytes, prefixed with its length. Raises the error of an object that does not
    pickle.
    """
    data = pickle.dumps(message, protocol=5)
    return _LENGTH.pack(len(data)) + data


def received(stream: IO[bytes]) -> Any:
    """Return the next message to this worker. Raises EOFError at the end of the stream."""
    head = stream.read(_LENGTH.size)
    if len(head) < _LENGTH.size:
        raise EOFError
    return pickle.loads(stream.read(_LENGTH.unpack(head)[0]))


async def received_from(reader: StreamReader) -> Any:
    """Return the next message to this worker, as `received` does. asyncio's error at the end becomes EOFError too."""
    (length,) = _LENGTH.unpack(await reader.readexactly(_LENGTH.size))
    return pickle.loads(await reader.readexactly(length))


def line_of(said: Any) -> bytes:
    """Return a worker's message, a dataclass, as a line.

    >>> line_of(Refused("play.python", "python2", "python3"))
    b'Refused {"field": "play.python", "seen": "python2", "expected": "python3"}\\n'
    """
    return f"{type(said).__name__} {json.dumps(asdict(said))}\n".encode()
