"""`prefect-rlhf nodes`: mistakes are one line, before anything is started."""

import importlib.util
import socket

import pytest

from prefect_rlhf.flows.commands.cli import main

NEEDS_RAY = pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="Ray is not installed")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--head", "203.0.113.7"], "--head: got '203.0.113.7:6379', expected an address of this machine and a free"),
        (["--join", "127.0.0.1:1"], "--join: got '127.0.0.1:1', expected HOST:PORT of a head that answers"),
        (["--join", "here"], "--join: got 'here', expected HOST:PORT of a head that answers"),
        (["--join", "127.0.0.1:1", "--stop"], "expected at most one of them; without them, the nodes are listed"),
        (["--address", "10.0.0.1"], "--address: '10.0.0.1' is not used: it needs --join"),
        (["--device", "old"], "--device: 'old' is not used: it needs --head or --join"),
        (["--head", "127.0.0.1", "--device", "a b"], "--device: got 'a b', expected up to 63 letters and digits"),
        (["--head", "127.0.0.1", "--kind", "cuda"], "--kind: got 'cuda', expected a machine with nvidia-smi"),
        (["--head", "127.0.0.1", "--kind", "cuda"], "or --device that does"),
        (["--head", "127.0.0.1", "--kind", "cuda", "--device", "old"], "--device: got 'old', expected one of h100, "),
        (["--devices", "8"], "--devices: 8 is not used: it needs --head or --join"),
        (["--stop", "--kind", "cpu"], "--kind: 'cpu' is not used: it needs --head or --join"),
        (["--join", "127.0.0.1:1", "--port", "7"], "--port: 7 is not used: it needs --head"),
    ],
)
def test_a_mistake_is_one_line(words, said, capsys, monkeypatch):
    monkeypatch.setenv("PATH", "")
    assert main(["nodes", *words]) == 2
    error = capsys.readouterr().err
    assert said in error and error.count("\n") == 1


def test_a_port_in_use_is_named(capsys):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        assert main(["nodes", "--head", "127.0.0.1", "--port", str(port)]) == 2
    assert f"got '127.0.0.1:{port}', expected" in (error := capsys.readouterr().err) and "in use" in error


@NEEDS_RAY
def test_a_cluster_that_does_not_answer_is_named(capsys, monkeypatch):
    monkeypatch.setenv("RAY_ADDRESS", "127.0.0.1:1")
    assert main(["nodes"]) == 2
    error = capsys.readouterr().err
    assert "RAY_ADDRESS: got '127.0.0.1:1', expected the address of a Ray cluster that answers" in error
    assert error.count("\n") == 1
