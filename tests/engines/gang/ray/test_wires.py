"""The wires of a gang: each is known by its first bytes, and a stranger neither gets in nor holds anybody up."""

import socket
import time
from contextlib import suppress

import pytest

from prefect_rlhf.engines.gang.ray.wires import Hello

pytestmark = pytest.mark.quick


@pytest.fixture
def listener():
    with socket.create_server(("127.0.0.1", 0)) as listener:
        yield listener


def test_strangers_are_closed_and_delay_no_wire(listener):
    """One that says nothing, half of it, another secret, or leaves at once."""
    address, hello = listener.getsockname(), Hello()
    silent, half, gone = (socket.create_connection(address) for _ in range(3))
    half.sendall(hello.secret[:3])
    gone.close()
    foreign, unasked = Hello().dial(address, 0, 0), hello.dial(address, 7, 0)
    named = {(number, kind): hello.dial(address, number, kind) for number in (0, 1) for kind in (0, 1)}
    wires = hello.answer(listener, named, time.monotonic() + 5.0)
    for which, ours in wires.items():
        named[which].sendall(bytes(which))
        assert ours.recv(2) == bytes(which), "it is that wire, and waits for what is said"
    for stranger in (silent, half, foreign, unasked):
        stranger.settimeout(5.0)
        with suppress(ConnectionResetError):
            assert stranger.recv(1) == b""
        stranger.close()
    for wire in (*named.values(), *wires.values()):
        wire.close()


def test_a_wire_that_is_missing_at_the_deadline_is_an_error(listener):
    hello = Hello()
    wire, silent = hello.dial(listener.getsockname(), 0, 0), socket.create_connection(listener.getsockname())
    with pytest.raises(TimeoutError, match="a connection is missing"):
        hello.answer(listener, [(0, 0), (0, 1)], time.monotonic() + 0.2)
    wire.close()
    silent.close()
