"""A store that goes away is waited for, for a while and with a line of the log each time; one that refuses is not."""

import threading
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import SimpleNamespace

import pytest

from prefect_rlhf.errors.errors import InvalidInput, OutputFailed
from prefect_rlhf.files.remote_path import local_path
from prefect_rlhf.files.storage import patience
from prefect_rlhf.files.storage.mirror import fetch
from prefect_rlhf.files.storage.patience import patiently
from prefect_rlhf.files.storage.publish import publish, withdraw
from tests.support.cases import first
from tests.support.object_stores import names, point_s3_to, put, s3_server


class Clock:
    """A clock that pauses alone move on, each in no time; `meanwhile[n]` happens in the n-th."""

    def __init__(self):
        self.now, self.pauses, self.meanwhile = 0.0, [], {}

    def monotonic(self):
        return self.now

    def sleep(self, seconds):
        self.pauses.append(seconds)
        self.now += seconds
        self.meanwhile.get(len(self.pauses), lambda: None)()


@pytest.fixture
def clock(monkeypatch):
    clock = Clock()
    monkeypatch.setattr(patience, "time", SimpleNamespace(monotonic=clock.monotonic, sleep=clock.sleep))
    monkeypatch.setattr(patience, "PATIENCE_SECONDS", 60.0)
    return clock


@pytest.fixture
def server(monkeypatch):
    """An S3 server, with a bucket named bucket."""
    with s3_server(monkeypatch) as server:
        yield server


@pytest.fixture
def written():
    """A file of a run's folder in the bucket's mirror."""
    file = local_path("s3://bucket/runs/amber/metrics.jsonl", "output_dir")
    file.parent.mkdir(parents=True)
    file.write_text("{}")
    return file


def test_writes_resume_when_a_store_returns_and_the_log_names_it(server, written, clock, caplog):
    server.stop()
    clock.meanwhile[2] = server.start
    publish(written)
    assert names("s3://bucket/runs") == ["amber/metrics.jsonl"]
    assert clock.pauses == [1.0, 2.0]
    lines = [record.getMessage() for record in caplog.records if record.name.endswith("patience")]
    assert len(lines) == 2
    assert lines[0].startswith(
        "s3://bucket/runs/amber/metrics.jsonl: waiting 1 s, at most 60 s in total, for a store that"
    )
    assert server.endpoint in lines[0] and "\n" not in lines[0]


def test_reads_and_deletions_resume_when_a_store_returns(server, clock):
    put("s3://bucket/data/a.txt", b"one")
    server.stop()
    clock.meanwhile = {1: server.start, 2: server.start}
    assert (fetch("s3://bucket/data", "prompts.path") / "a.txt").read_text() == "one"
    server.stop()
    withdraw(local_path("s3://bucket/data", "output_dir"))
    assert names("s3://bucket/data") == [] and len(clock.pauses) == 2


@pytest.mark.all  # the test waits out the patience
def test_an_absent_store_is_given_up_in_one_line_and_asked_once_more(monkeypatch, written, clock):
    """The run that it ends asks more of it, as it cleans up; the next time that the store is there, it is new."""
    point_s3_to(monkeypatch, "http://127.0.0.1:9")
    with pytest.raises(OutputFailed, match="metrics.jsonl cannot be written: expected a store that answers") as caught:
        publish(written)
    assert "\n" not in str(caught.value)
    assert clock.pauses == [1.0, 2.0, 4.0, 8.0, 15.0, 15.0, 15.0] and clock.now == 60.0
    with pytest.raises(OutputFailed):
        publish(written)
    assert len(clock.pauses) == 7
    with s3_server(monkeypatch) as server:
        publish(written)
        server.stop()
        clock.meanwhile[8] = server.start
        publish(written)
    assert len(clock.pauses) == 8


@pytest.mark.parametrize("url", ["s3://nobody/runs", "s3://bucket/nothing"])
def test_missing_remote_files_are_not_waited_for(server, clock, url):
    with pytest.raises(InvalidInput, match="expected (an existing bucket|a path that exists)"):
        fetch(url, "resume_from")
    assert clock.pauses == []


@contextmanager
def answering(status, body):
    """A server that answers every request alike."""

    class Handler(BaseHTTPRequestHandler):
        def answer(self):
            self.rfile.read(int(self.headers.get("content-length") or 0))
            self.send_response(status)
            self.send_header("content-length", str(len(body)))
            self.end_headers()
            self.wfile.write(b"" if self.command == "HEAD" else body)

        do_GET = do_HEAD = do_PUT = do_POST = answer  # noqa: N815  names of http.server

        def log_message(self, *words):
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()


@pytest.mark.parametrize(
    ("status", "code", "waits"),
    first(
        2,
        [
            (503, "SlowDown", True),
            (403, "AccessDenied", False),
            (500, "InternalError", True),
            (502, "", True),
            (429, "", True),
            (403, "", False),
            (404, "NoSuchBucket", False),
        ],
    ),
)
def test_errors_of_a_server_are_waited_out_and_refusals_are_not(monkeypatch, written, clock, status, code, waits):
    monkeypatch.setattr(patience, "PATIENCE_SECONDS", 1.0)
    body = f"<?xml version='1.0'?><Error><Code>{code}</Code><Message>m</Message></Error>".encode() if code else b""
    with answering(status, body) as endpoint:
        point_s3_to(monkeypatch, endpoint)
        with pytest.raises(OutputFailed):
            publish(written)
    assert clock.pauses == ([1.0] if waits else [])


def test_an_overloaded_server_is_waited_for_and_a_refusal_is_final(clock, monkeypatch):
    monkeypatch.setattr(patience, "PATIENCE_SECONDS", 1.0)
    for status, pauses in ((503, [1.0]), (403, [1.0])):
        with answering(status, b"") as endpoint, pytest.raises(InvalidInput):
            fetch(f"{endpoint}/data", "prompts.path")
        assert clock.pauses == pauses


def test_a_full_disk_is_not_waited_for(clock):
    def write():
        raise OSError(28, "No space left on device")

    with pytest.raises(OSError, match="No space left"):
        patiently("s3://bucket/data", write)
    assert clock.pauses == []
