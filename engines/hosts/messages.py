"""What the pool and its workers say to each other: pickles to a worker, one line of JSON back for each thing done.

A worker that dies in the middle of a line leaves half a line, which is dropped; nothing that it says is unpickled.
"""

from __future__ import annotations

import json
import pickle
import struct
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import IO, Any

from prefect_rlhf.engines.hosts.function import HostFunction
from prefect_rlhf.engines.hosts.scores import Verdict

_LENGTH = struct.Struct(">Q")


@dataclass(frozen=True, slots=True)
class Start:
    """The first thing that a worker is sent. `path` is searched for modules; `concurrent` async calls run at a time."""

    functions: tuple[HostFunction, ...]
    path: tuple[str, ...]
    deadline_seconds: float
    concurrent: int


@dataclass(frozen=True, slots=True)
class Job:
    """Calls of one function: by their numbers, the rows that each is of."""

    function: int
    calls: Mapping[int, tuple[Mapping[str, Any], ...]]


@dataclass(frozen=True, slots=True)
class Loading:
    """A worker begins to import a function."""

    function: int


@dataclass(frozen=True, slots=True)
class Refused:
    """A function cannot be used: what was seen, and what would be right."""

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
    """A call ended: a verdict for each of its rows."""

    call: int
    verdicts: tuple[Verdict, ...]


Said = Loading | Refused | Loaded | Begun | Done
_SAID = {kind.__name__: kind for kind in (Loading, Refused, Loaded, Begun, Done)}


def packed(message: Start | Job) -> bytes:
    """Return a message to a worker as bytes, its length first. Raises what pickling a foreign object raises."""
    data = pickle.dumps(message, protocol=5)
    return _LENGTH.pack(len(data)) + data


def received(stream: IO[bytes]) -> Any:
    """Return the next message to this worker. Raises EOFError when there will be none."""
    head = stream.read(_LENGTH.size)
    if len(head) < _LENGTH.size:
        raise EOFError
    return pickle.loads(stream.read(_LENGTH.unpack(head)[0]))


def line_of(said: Said) -> bytes:
    """Return what a worker says as a line.

    >>> line_of(Begun(3))
    b'["Begun", {"call": 3}]\\n'
    """
    return json.dumps([type(said).__name__, asdict(said)]).encode() + b"\n"


def said_in(line: bytes) -> Said:
    """Read such a line.

    >>> said_in(line_of(Done(3, (Verdict(0.1),)))) == Done(3, (Verdict(0.1),))
    True
    """
    name, fields = json.loads(line)
    if name == "Done":
        return Done(fields["call"], tuple(Verdict(**verdict) for verdict in fields["verdicts"]))
    if name == "Loaded":
        fields["named"] = tuple(fields["named"])
    said: Said = _SAID[name](**fields)
    return said
