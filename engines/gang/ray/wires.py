"""Pipes between machines: TCP connections that detect an unreachable peer within seconds."""

from __future__ import annotations

import secrets
import selectors
import socket
import struct
import time
from collections.abc import Generator, Iterable
from contextlib import closing
from dataclasses import dataclass, field

Address = tuple[str, int]
"""Host and port."""

CONNECT_SECONDS = 10.0
_QUIET_SECONDS, _PROBES = 5, 3  # silence before each probe; unanswered probes until the peer counts as lost
_HELLO = struct.Struct("!16sII")


def reach(address: Address) -> socket.socket:
    """Connect. Raises OSError, after CONNECT_SECONDS at the latest."""
    wire = socket.create_connection(address, CONNECT_SECONDS)
    wire.settimeout(None)
    _watch(wire)
    return wire


def _watch(wire: socket.socket) -> None:
    wire.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    wire.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    wire.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, _QUIET_SECONDS)
    wire.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, _QUIET_SECONDS)
    wire.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, _PROBES)
    wire.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, 1000 * _QUIET_SECONDS * (_PROBES + 1))


@dataclass(frozen=True, slots=True)
class Hello:
    """The first bytes on a wire: the gang's secret, which keeps strangers out, and the wire's identity."""

    secret: bytes = field(default_factory=lambda: secrets.token_bytes(16))

    def dial(self, address: Address, number: int, kind: int) -> socket.socket:
        """Connect to the controller at `address`; return the wire of this `kind` for rank or node `number`. Raises
        OSError.
        """
        wire = reach(address)
        wire.sendall(_HELLO.pack(self.secret, number, kind))
        return wire

    def answer(self, listener: socket.socket, expected: Iterable[tuple[int, int]], deadline: float) -> Wires:
        """Accept only the wires of these (number, kind). Raises TimeoutError at the (monotonic) deadline.

        A client that connects but sends no bytes does not delay the others.
        """
        missing, wires = set(expected), Wires()
        with closing(_introduced(listener, deadline)) as introduced:
            while missing:
                wire, said = next(introduced)
                which = self._named(said)
                if which not in missing:
                    wire.close()
                    continue
                wire.setblocking(True)
                _watch(wire)
                missing.remove(which)
                wires[which] = wire
        return wires

    def _named(self, said: bytes) -> tuple[int, int] | None:
        """Return the number and kind that a wire sent, or None for a stranger."""
        if len(said) < _HELLO.size:
            return None
        secret, number, kind = _HELLO.unpack(said)
        return (number, kind) if secrets.compare_digest(secret, self.secret) else None


def _introduced(listener: socket.socket, deadline: float) -> Generator[tuple[socket.socket, bytes]]:
    """Yield each wire with its first bytes, fewer if the wire has ended; close silent wires at the end.

    Raises TimeoutError at the deadline.
    """
    silent: dict[socket.socket, bytearray] = {}  # wires with an incomplete hello, and its bytes so far
    listener.setblocking(False)
    with selectors.DefaultSelector() as waiting:
        waiting.register(listener, selectors.EVENT_READ)
        try:
            while (left := deadline - time.monotonic()) > 0:
                for wire in [key.fileobj for key, _ in waiting.select(left)]:
                    assert isinstance(wire, socket.socket)
                    if wire is listener:
                        accepted, _ = listener.accept()
                        accepted.setblocking(False)
                        waiting.register(accepted, selectors.EVENT_READ)
                        silent[accepted] = bytearray()
                    elif _hear(wire, silent[wire]):
                        waiting.unregister(wire)
                        yield wire, bytes(silent.pop(wire))
            raise TimeoutError("a connection is missing")
        finally:
            for wire in silent:
                wire.close()


def _hear(wire: socket.socket, said: bytearray) -> bool:
    """Read more of a wire's first bytes; return whether they are complete."""
    try:
        more = wire.recv(_HELLO.size - len(said))
    except BlockingIOError:
        return False
    except OSError:
        return True
    said += more
    return not more or len(said) == _HELLO.size


Wires = dict[tuple[int, int], socket.socket]
"""By number and kind."""
