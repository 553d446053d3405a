"""Emulators of object stores that answer over HTTP on this machine: moto for S3, gcp-storage-emulator for GCS."""

import json
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.request import Request, urlopen

import pytest
from pyarrow import fs

from prefect_rlhf.files.storage import stores

BUCKET = "bucket"


@contextmanager
def s3_emulator(monkeypatch: pytest.MonkeyPatch, address: str = "127.0.0.1") -> Iterator[str]:
    """Answer as S3 at an address, with one empty bucket, which the environment points to; gives `s3://bucket`."""
    with s3_server(monkeypatch, address):
        yield f"s3://{BUCKET}"


class S3Server:
    """An emulator of S3 at an address, which can go away and come back with what it held."""

    def __init__(self, address: str) -> None:
        self.place = address, free_port()
        self.endpoint = f"http://{address}:{self.place[1]}"
        self._running: list[Any] = []

    def start(self) -> None:
        """Answer from now on."""
        from moto.moto_server.threaded_moto_server import ThreadedMotoServer

        server = ThreadedMotoServer(*self.place, verbose=False)
        server.start()
        server.get_host_and_port()  # once it listens
        self._running.append(server)

    def stop(self) -> None:
        """Refuse connections from now on."""
        while self._running:
            self._running.pop().stop()


@contextmanager
def s3_server(monkeypatch: pytest.MonkeyPatch, address: str = "127.0.0.1") -> Iterator[S3Server]:
    """Answer as `s3_emulator` does; gives the server."""
    server = S3Server(address)
    server.start()
    point_s3_to(monkeypatch, server.endpoint)
    urlopen(Request(f"{server.endpoint}/moto-api/reset", method="POST")).read()
    urlopen(Request(f"{server.endpoint}/{BUCKET}", method="PUT")).read()
    try:
        yield server
    finally:
        server.stop()


@contextmanager
def gcs_emulator(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Answer as GCS with one empty bucket, which the environment points to; gives `gs://bucket`."""
    from gcp_storage_emulator.server import create_server

    port = free_port()
    server = create_server("127.0.0.1", port, in_memory=True)
    server.start()
    monkeypatch.setenv(stores.GCS_EMULATOR, f"http://127.0.0.1:{port}")
    stores._gcs.cache_clear()
    body = json.dumps({"name": BUCKET}).encode()
    headers = {"Content-Type": "application/json"}
    urlopen(Request(f"http://127.0.0.1:{port}/storage/v1/b?project=p", data=body, headers=headers)).read()
    try:
        yield f"gs://{BUCKET}"
    finally:
        server.stop()
        stores._gcs.cache_clear()


def point_s3_to(monkeypatch: pytest.MonkeyPatch, endpoint: str) -> None:
    """Let S3 be at an address, for this process and its children."""
    for name, value in {"ACCESS_KEY_ID": "test", "SECRET_ACCESS_KEY": "test", "DEFAULT_REGION": "us-east-1"}.items():
        monkeypatch.setenv(f"AWS_{name}", value)
    monkeypatch.setenv(stores.S3_ENDPOINTS[0], endpoint)
    stores._s3.cache_clear()


def put(url: str, content: bytes | Path) -> None:
    """Write an object, or every file of a folder below a remote path, by the store's own interface."""
    if isinstance(content, Path):
        for file in (path for path in content.rglob("*") if path.is_file()):
            put(f"{url}/{file.relative_to(content).as_posix()}", file.read_bytes())
        return
    store = stores.open_store(url, "test")
    with store.files.open_output_stream(store.path) as out:
        out.write(content)


def names(url: str) -> list[str]:
    """Return the names of all objects below a remote path."""
    store = stores.open_store(url, "test")
    found = store.files.get_file_info(fs.FileSelector(store.path, recursive=True, allow_not_found=True))
    return sorted(info.path.removeprefix(f"{store.path}/") for info in found if info.type == fs.FileType.File)


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


def wait_a_second() -> None:
    """Let the clock of a store that counts whole seconds go on."""
    time.sleep(1.1 - time.time() % 1)
