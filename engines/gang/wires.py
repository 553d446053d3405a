"""Pipes between machines: TCP connections that notice in seconds when the other side can no longer be reached."""

from __future__ import annotations

import secrets
import socket
import struct
import time
from collections.abc import Iterable
from dataclasses import dataclass, field

Address = tuple[str, int]
"""Host and port."""

CONNECT_SECONDS = 10.0
_QUIET_SECONDS, _PROBES = 5, 3  # before the first probe and between two; unanswered ones until the other side is lost
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
    """The first bytes on a wire: the gang's secret, so that no stranger is listened to, and which wire it is."""

    secret: bytes = field(default_factory=lambda: secrets.token_bytes(16))

    def dial(self, address: Address, number: int, kind: int) -> socket.socket:
        """Return the wire `kind` of rank or node `number` to the controller at `address`. Raises OSError."""
        wire = reach(address)
        wire.sendall(_HELLO.pack(self.secret, number, kind))
        return wire

    def answer(self, listener: socket.socket, expected: Iterable[tuple[int, int]], deadline: float) -> Wires:
        """Accept the wires of these (number, kind), others not. Raises TimeoutError at the (monotonic) deadline."""
        missing, wires = set(expected), {}
        while missing:
            listener.settimeout(max(0.01, deadline - time.monotonic()))
            wire, _ = listener.accept()
            wire.settimeout(CONNECT_SECONDS)
            try:
                secret, number, kind = _HELLO.unpack(wire.recv(_HELLO.size, socket.MSG_WAITALL))
            except (OSError, struct.error):
                wire.close()
                continue
            if not secrets.compare_digest(secret, self.secret) or (number, kind) not in missing:
                wire.close()
                continue
            wire.settimeout(None)
            _watch(wire)
            missing.remove((number, kind))
            wires[number, kind] = wire
        return wires


Wires = dict[tuple[int, int], socket.socket]
"""By number and kind."""
