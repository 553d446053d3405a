"""Messages between the pool and its workers: pickles to a worker, lines of JSON back, a line per event.

If a worker dies within a line, the incomplete line is dropped. A worker's messages are never unpickled.
"""

import json
import math
import pickle
import struct
from asyncio import StreamReader
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from typing import IO, Any, TypeVar, get_args

from prefect_rlhf.engines.functions.function import HostFunction
from prefect_rlhf.engines.functions.scores import Blame, Verdict
from prefect_rlhf.files.foreign_file import parse_json

_LENGTH = struct.Struct(">Q")


@dataclass(frozen=True, slots=True)
class Start:
    """The first message to a worker. `path` is searched for modules; `concurrent` async calls run at a time."""

    functions: tuple[HostFunction, ...]
    path: tuple[str, ...]
    deadline_seconds: float
    concurrent: int


@dataclass(frozen=True, slots=True)
class Job:
    """Calls of a function: the rows of each call, by the call's number."""

    function: int
    calls: Mapping[int, tuple[Mapping[str, Any], ...]]


@dataclass(frozen=True, slots=True)
class Loading:
    """A worker begins to import a function."""

    function: int


@dataclass(frozen=True, slots=True)
class Refused:
    """A function cannot be used: the value seen, and the expected value."""

    function: int
    seen: str
    expected: str


@dataclass(frozen=True, slots=True)
class Loaded:
    """A function is imported: whether it is async, the columns that it names, its `file:line in function`."""

    function: int
    asynchronous: bool
    named: tuple[str, ...]
    place: str


@dataclass(frozen=True, slots=True)
class Begun:
    """A call begins."""

    call: int


@dataclass(frozen=True, slots=True)
class Done:
    """A call has ended: a verdict for each of its rows."""

    call: int
    verdicts: tuple[Verdict, ...]


Said = Loading | Refused | Loaded | Begun | Done
Value = TypeVar("Value")


def packed(message: object) -> bytes:
    """Return a message to a worker as bytes, its length first. Raises the error of an object that does not pickle."""
    data = pickle.dumps(message, protocol=5)
    return _LENGTH.pack(len(data)) + data


def received(stream: IO[bytes]) -> Any:
    """Return the next message to this worker. Raises EOFError at the end of the stream."""
    head = stream.read(_LENGTH.size)
    if len(head) < _LENGTH.size:
        raise EOFError
    return pickle.loads(stream.read(_LENGTH.unpack(head)[0]))


async def received_from(reader: StreamReader) -> Any:
    """Return the next message to this worker, as `received` does. asyncio's error at the end is an EOFError too."""
    (length,) = _LENGTH.unpack(await reader.readexactly(_LENGTH.size))
    return pickle.loads(await reader.readexactly(length))


def line_of(said: Any) -> bytes:
    """Return a worker's message, a dataclass, as a line.

    >>> line_of(Begun(3))
    b'["Begun", {"call": 3}]\\n'
    """
    return json.dumps([type(said).__name__, asdict(said)]).encode() + b"\n"


def said_in(line: bytes) -> Said:
    """Read such a line. Raises ValueError for another line: a user's function may write to the same socket.

    >>> said_in(line_of(Done(3, (Verdict(0.1),)))) == Done(3, (Verdict(0.1),))
    True
    """
    return parsed(line, _READ)


def parsed(line: bytes, read: Mapping[str, Callable[..., Value]]) -> Value:
    """Return the message of a line by the functions that check the fields of each message. Raises ValueError."""
    try:
        name, fields = parse_json(line)
        return read[name](**fields)
    except (ValueError, TypeError, KeyError) as error:
        raise ValueError("no message of a worker") from error


def _loading(function: int) -> Loading:
    return Loading(exactly(int, function))


def _refused(function: int, seen: str, expected: str) -> Refused:
    return Refused(exactly(int, function), exactly(str, seen), exactly(str, expected))


def _loaded(function: int, asynchronous: bool, named: list[str], place: str) -> Loaded:
    names = tuple(exactly(str, name) for name in exactly(list, named))
    return Loaded(exactly(int, function), exactly(bool, asynchronous), names, exactly(str, place))


def _begun(call: int) -> Begun:
    return Begun(exactly(int, call))


def _done(call: int, verdicts: list[dict[str, Any]]) -> Done:
    return Done(exactly(int, call), tuple(_verdict(**verdict) for verdict in exactly(list, verdicts)))


def _verdict(value: float | None, failed: str, held_up: bool, metrics: dict[str, float], blame: Blame) -> Verdict:
    numbers = {name: finite(number) for name, number in exactly(dict, metrics).items()}
    if blame not in get_args(Blame):
        raise ValueError(f"{blame!r:.80} is no blame")
    number = None if value is None else finite(value)
    return Verdict(number, exactly(str, failed), exactly(bool, held_up), numbers, blame)


_READ: Mapping[str, Callable[..., Said]] = {
    "Loading": _loading,
    "Refused": _refused,
    "Loaded": _loaded,
    "Begun": _begun,
    "Done": _done,
}


def exactly(kind: type[Value], value: Value) -> Value:
    """Return a field of this very type. Raises TypeError for another value."""
    if type(value) is not kind:
        raise TypeError(f"{value!r:.80} is no {kind.__name__}")
    return value


def finite(value: float) -> float:
    """Return a finite float. Raises TypeError for another value, and ValueError for infinity and NaN."""
    if not math.isfinite(exactly(float, value)):
        raise ValueError(f"{value} is not finite")
    return value
