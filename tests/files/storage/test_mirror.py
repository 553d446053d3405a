"""Remote paths to read: over HTTP against emulators of S3 and GCS, and a plain web server through fsspec."""

import os
import socket
import tarfile
import threading
import zipfile
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer

import fsspec
import pytest

from prefect_rlhf.errors.errors import InvalidInput
from prefect_rlhf.files.remote_path import is_remote, local_path, remote_path
from prefect_rlhf.files.storage.inputs import model_folder
from prefect_rlhf.files.storage.mirror import fetch
from tests.support.object_stores import point_s3_to, put, wait_a_second


def content(folder):
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_a_mirror_has_exactly_the_folder(bucket):
    stored = {"a.txt": b"one", "deep/er/b.bin": bytes(3_000_000)}
    for name, data in stored.items():
        put(f"{bucket}/data/{name}", data)
    put(f"{bucket}/database/c.txt", b"another folder")
    assert content(fetch(f"{bucket}/data", "prompts.path")) == stored
    assert content(fetch(f"{bucket}/data/", "prompts.path")) == stored


def test_a_single_file_is_mirrored_under_its_own_name(bucket):
    put(f"{bucket}/data/rows.jsonl", b"{}")
    path = fetch(f"{bucket}/data/rows.jsonl", "prompts.path")
    assert (path.name, path.read_bytes()) == ("rows.jsonl", b"{}")
    assert remote_path(path) == f"{bucket}/data/rows.jsonl"


def test_what_changed_or_went_at_the_store_changes_and_goes_in_the_mirror(bucket):
    put(f"{bucket}/data/a.txt", b"one")
    put(f"{bucket}/data/b.txt", b"two")
    fetch(f"{bucket}/data", "prompts.path")
    wait_a_second()
    put(f"{bucket}/data/a.txt", b"six")
    from prefect_rlhf.files.storage.stores import open_store

    store = open_store(f"{bucket}/data/b.txt", "test")
    store.files.delete_file(store.path)
    assert content(fetch(f"{bucket}/data", "prompts.path")) == {"a.txt": b"six"}


def test_current_files_are_not_copied_again(bucket):
    put(f"{bucket}/data/a.txt", b"one")
    copied = fetch(f"{bucket}/data", "prompts.path") / "a.txt"
    before = copied.stat().st_ino
    assert fetch(f"{bucket}/data", "prompts.path").joinpath("a.txt").stat().st_ino == before


def test_any_other_scheme_is_read_through_fsspec(tmp_path):
    (tmp_path / "rows.jsonl").write_text('{"prompt": "hello"}\n')
    handler = partial(SimpleHTTPRequestHandler, directory=str(tmp_path))
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        path = fetch(f"http://127.0.0.1:{server.server_port}/rows.jsonl", "prompts.path")
        assert path.read_text() == '{"prompt": "hello"}\n'
    finally:
        server.shutdown()
        server.server_close()


@pytest.mark.parametrize(
    ("path", "expected"),
    [
        ("s3://nobody/models", "an existing bucket"),
        ("s3://bucket/models", "a path that exists"),
        ("nowhere://bucket/models", "a scheme that fsspec knows here"),
        ("s3://bucket/../models", "names between single slashes"),
        ("s3://bucket//models", "names between single slashes"),
        ("s3://", "names between single slashes"),
    ],
)
def test_an_unreadable_path_gives_one_line_with_field_and_path(s3, path, expected):
    with pytest.raises(InvalidInput, match=expected) as caught:
        fetch(path, "actor.path")
    assert str(caught.value).startswith(f"actor.path: got {path!r}")
    assert "\n" not in str(caught.value)


def archive(path, names):
    with zipfile.ZipFile(path, "w") as written:
        for name in names:
            written.writestr(name, "{}")


@pytest.mark.parametrize("name", ["../../../../../out.txt", "/out.txt", "deep//out.txt", "./out.txt", "deep/.."])
@pytest.mark.parametrize("below", ["model", ""])
def test_an_archive_with_a_name_that_means_another_place_is_refused_before_anything_is_written(
    tmp_path, cache, name, below
):
    archive(tmp_path / "evil.zip", ["model/config.json", f"model/{name}"])
    before = content(tmp_path)
    with pytest.raises(
        InvalidInput, match="actor.path: got 'zip://.*, expected file names without empty parts"
    ) as caught:
        fetch(f"zip://{below}::{tmp_path}/evil.zip", "actor.path")
    assert "\n" not in str(caught.value)
    assert {name for name in content(tmp_path).keys() - before.keys() if not name.startswith("cache/locks/")} == set()


def test_a_store_whose_names_are_not_below_it_is_refused(cache):
    memory = fsspec.filesystem("memory")
    memory.pipe("/stored/model/config.json", b"{}")
    memory.store["/stored/model/../../../out.txt"] = memory.store["/stored/model/config.json"]
    with pytest.raises(InvalidInput, match="not '.*out.txt'"):
        fetch("memory://stored/model", "actor.path")
    assert not (cache / "out.txt").exists() and not list(cache.rglob("config.json"))


@pytest.mark.parametrize(
    ("kind", "target"), [(tarfile.SYMTYPE, "/etc/hostname"), (tarfile.LNKTYPE, "/etc/hostname"), (tarfile.FIFOTYPE, "")]
)
def test_links_out_of_an_archive_and_pipes_in_it_are_refused(tmp_path, kind, target):
    with tarfile.open(tmp_path / "evil.tar", "w") as written:
        member = tarfile.TarInfo("model/config.json")
        member.type, member.linkname = kind, target
        written.addfile(member)
    with pytest.raises(InvalidInput, match="actor.path: got 'tar://model"):
        fetch(f"tar://model::{tmp_path}/evil.tar", "actor.path")


@pytest.mark.parametrize(
    ("path", "expected"),
    [
        ("zip://a::{}/nowhere.zip", "a path that exists"),
        ("zip://a::{}/bad.zip", "a path that its store can serve"),
        ("tar://a::{}/bad.zip", "a path that its store can serve"),
        ("data://a", "a path that its store can serve"),
        ("hf://a", "a path that its store can serve .*a"),
    ],
)
def test_an_unreadable_path_of_another_scheme_gives_one_line(tmp_path, path, expected):
    (tmp_path / "bad.zip").write_text("not an archive")
    path = path.format(tmp_path)
    with pytest.raises(InvalidInput, match=expected) as caught:
        fetch(path, "actor.path")
    assert str(caught.value).startswith(f"actor.path: got {path!r}") and "\n" not in str(caught.value)


def test_a_store_that_refuses_connections_is_named_with_its_address(monkeypatch):
    point_s3_to(monkeypatch, "http://127.0.0.1:9")
    with pytest.raises(InvalidInput, match="a store that answers at http://127.0.0.1:9 .AWS_ENDPOINT_URL_S3"):
        fetch("s3://bucket/models", "actor.path")


def test_a_store_that_accepts_and_never_answers_is_given_up(monkeypatch):
    monkeypatch.setattr("prefect_rlhf.files.storage.stores.REQUEST_SECONDS", 1.0)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        point_s3_to(monkeypatch, f"http://127.0.0.1:{silent.getsockname()[1]}")
        with pytest.raises(InvalidInput, match="a store that answers"):
            fetch("s3://bucket/models", "actor.path")


def test_a_local_path_stays_as_it_is():
    assert not is_remote("models/a:b//c")
    assert model_folder("models/llama", "actor.path") == local_path("models/llama", "actor.path")
    assert os.fspath(model_folder("models/llama", "actor.path")) == "models/llama"
